// Runs the whole control plane, but for its bytes, through random schedules: every seed must end
// with agreement or a named error.
//
//   core_simulate [--seeds N] [--first K]   seeds K .. K+N-1 (0 .. 1999); how many ended how
//   core_simulate --seed K                  one seed, with its trace
#include <array>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <iostream>
#include <string>
#include <string_view>

#include "control_plane/world.h"

namespace {

using namespace horovod::sim;

int run_traced(uint64_t seed, size_t most_lines) {
  std::deque<std::string> lines;
  int result = 0;
  try {
    World world(seed, [&](const std::string& line) {
      lines.push_back(line);
      if (lines.size() > most_lines) lines.pop_front();
    });
    const Ending ending = world.run();
    lines.push_back(std::string("ended: ").append(kEndings[static_cast<size_t>(ending)]));
  } catch (const std::exception& error) {
    lines.push_back(std::string("does not hold: ") + error.what());
    result = 1;
  }
  for (const std::string& line : lines) std::cout << line << '\n';
  return result;
}

int run_many(uint64_t first, uint64_t count) {
  std::array<uint64_t, kEndings.size()> endings{};
  uint64_t decisions = 0;
  const auto start = std::chrono::steady_clock::now();
  for (uint64_t seed = first; seed < first + count; ++seed) {
    try {
      World world(seed);
      ++endings[static_cast<size_t>(world.run())];
      decisions += world.decisions();
      if (seed % 64 == 0) {  // the same input gives the same output
        World again(seed);
        again.run();
        require(again.digest() == world.digest(), "a seed decides everything");
      }
    } catch (const std::exception& error) {
      std::cout << "seed " << seed << ": does not hold: " << error.what() << '\n';
      return run_traced(seed, 200) == 0 ? 2 : 1;
    }
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  std::cout << count << " schedules, " << decisions << " decisions, " << seconds.count() << " s\n";
  for (size_t i = 0; i < endings.size(); ++i) {
    std::cout << "  " << kEndings[i] << ": " << endings[i] << '\n';
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t first = 0, count = 2000;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string_view option = argv[i];
    const uint64_t value = std::strtoull(argv[i + 1], nullptr, 10);
    if (option == "--seed") return run_traced(value, 1'000'000);
    if (option == "--seeds") count = value;
    if (option == "--first") first = value;
  }
  return run_many(first, count);
}
