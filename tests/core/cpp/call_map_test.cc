// The laws of the map from (set, name) to calls, with random lives beside std::map.
#include "core/call_map.h"

#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "check.h"

namespace horovod {
namespace {

void it_is_a_map_whose_keys_may_come_again() {
  const std::vector<std::string> names{"a", "b", "allreduce.conv1.weight", ""};
  CallMap<int> map;
  std::map<std::pair<uint32_t, std::string>, int> truth;
  std::mt19937 random(1);
  for (int step = 1; step < 20000; ++step) {
    const uint32_t set = random() % 3;
    const std::string& name = names[random() % names.size()];
    const CallKey key{set, name};
    const auto known = truth.find({set, name});
    CHECK_EQ(map.contains(key), known != truth.end());
    CHECK((map.find(key) != nullptr) == (known != truth.end()));
    if (known == truth.end()) {
      CHECK_EQ(map.add(key, step), step);
      truth[{set, name}] = step;
    } else if (random() % 2 == 0) {
      CHECK_EQ(*map.find(key), known->second);
    } else {
      CHECK_EQ(map.take(key).value(), known->second);
      CHECK(!map.take(key).has_value());
      truth.erase(known);
    }
    if (step % 1000 == 0) {
      map.erase_if([&](const CallKey& k, int) { return k.set == set; });
      std::erase_if(truth, [&](const auto& item) { return item.first.first == set; });
    }
    size_t seen = 0;
    map.for_each([&](const CallKey& k, int value) {
      ++seen;
      CHECK_EQ(truth.at({k.set, std::string(k.name)}), value);
    });
    CHECK_EQ(seen, truth.size());
  }
}

// What was taken leaves nothing behind that would keep it alive.
void a_taken_value_is_the_takers_alone() {
  CallMap<std::shared_ptr<int>> map;
  std::shared_ptr<int> value = std::make_shared<int>(1);
  map.add({0, "x"}, value);
  CHECK(map.take({0, "x"}).value() == value);
  CHECK_EQ(value.use_count(), 1);
}

}  // namespace
}  // namespace horovod

int main() {
  using namespace horovod;
  it_is_a_map_whose_keys_may_come_again();
  a_taken_value_is_the_takers_alone();
}
