// The laws of control messages on the wire: what is encoded is decoded, and whatever else arrives
// is refused or a valid message, without memory that its length doesn't justify.
#include "core/wire.h"

#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <random>
#include <string>

#include "check.h"

namespace {
size_t allocated = 0;  // bytes asked for since the last reset; this test is one thread
}  // namespace

// Not inlined: GCC would take malloc and free in them for mismatched pairs.
[[gnu::noinline]] void* operator new(size_t bytes) {
  allocated += bytes;
  if (void* memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace horovod {
namespace {

using Rng = std::mt19937_64;
constexpr size_t kTypes = std::variant_size_v<Message>;

uint64_t below(Rng& rng, uint64_t n) { return rng() % n; }
bool coin(Rng& rng) { return below(rng, 2) == 0; }

std::string random_string(Rng& rng, size_t most) {
  std::string out(below(rng, most + 1), '\0');
  for (char& c : out) c = static_cast<char>(rng());
  return out;
}

double random_double(Rng& rng) {
  constexpr double kSpecial[] = {
      0.0, -0.0, 1.0, 0.1, -1e300, 5e-324, std::numeric_limits<double>::infinity()};
  return kSpecial[below(rng, std::size(kSpecial))];
}

int32_t random_int(Rng& rng) { return static_cast<int32_t>(rng()); }

std::vector<int32_t> random_ascending(Rng& rng) {
  std::vector<int32_t> ranks;
  int32_t rank = -1;
  for (uint64_t n = below(rng, 6); n > 0; --n) {
    rank += 1 + static_cast<int32_t>(below(rng, 100));
    ranks.push_back(rank);
  }
  return ranks;
}

Status random_status(Rng& rng) {
  return {static_cast<ErrorKind>(below(rng, 8)), random_string(rng, 40), random_int(rng)};
}

TensorSpec random_spec(Rng& rng) {
  TensorSpec spec{static_cast<DType>(below(rng, kDTypes.size())), {}};
  for (uint64_t n = below(rng, 5); n > 0; --n)
    spec.shape.push_back(static_cast<int64_t>(below(rng, 9)));
  if (below(rng, 8) == 0)
    spec.shape = {0, int64_t{1} << 62, int64_t{1} << 62};  // empty is never too large
  return spec;
}

Request random_request(Rng& rng) {
  Request r;
  r.kind = static_cast<OpKind>(below(rng, kOps.size()));
  r.op = static_cast<ReduceOp>(below(rng, kReduceOps.size()));
  r.unnamed = coin(rng);
  r.scalar = coin(rng);
  r.set = static_cast<uint32_t>(rng());
  r.root = random_int(rng);
  r.prescale = random_double(rng);
  r.postscale = random_double(rng);
  r.name = random_string(rng, 30);
  for (uint64_t n = below(rng, 4); n > 0; --n) r.tensors.push_back(random_spec(rng));
  for (uint64_t n = below(rng, 4); n > 0; --n) r.ranks.push_back(random_int(rng));
  return r;
}

Entry random_entry(Rng& rng) {
  Entry e;
  e.seq = rng();
  e.plan_hash = rng();
  e.kind = static_cast<OpKind>(below(rng, kOps.size()));
  e.set = static_cast<uint32_t>(rng());
  e.contributors = random_ascending(rng);
  for (uint64_t n = below(rng, 4); n > 0; --n) e.items.push_back({rng(), random_string(rng, 30)});
  e.status = random_status(rng);
  e.value = static_cast<int64_t>(rng());
  e.ranks = random_ascending(rng);
  e.terms = random_string(rng, 50);
  return e;
}

Message random_message(Rng& rng, size_t type) {
  const auto set = static_cast<uint32_t>(rng());
  switch (type) {
    case 0:
      return Announce{random_request(rng), coin(rng), rng(), random_string(rng, 20)};
    case 1:
      return AnnounceCached{rng(), coin(rng), random_string(rng, 20)};
    case 2:
      return Blocked{set, random_string(rng, 30)};
    case 3:
      return Reject{static_cast<OpKind>(below(rng, kOps.size())), set, random_string(rng, 30),
                    random_string(rng, 60)};
    case 4:
      return Done{rng()};
    case 5:
      return Leave{random_string(rng, 60)};
    case 6:
      return Located{rng(), random_string(rng, 30), random_string(rng, 60)};
    case 7:
      return random_entry(rng);
    case 8:
      return Resend{rng()};
    case 9:
      return Abort{random_status(rng)};
    case 10:
      return Locate{rng(), set, random_string(rng, 30)};
    default:
      return Goodbye{random_status(rng)};
  }
}

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

std::string encoded(const Message& message, int32_t rank) {
  std::string out;
  encode(message, rank, out);
  return out;
}

// Error, no frame, or a frame that is as valid as one of ours: then it can be encoded again.
enum class Outcome { Refused, Incomplete, Valid };

Outcome try_decode(const std::string& text) {
  std::span<const std::byte> bytes = bytes_of(text);
  Frame frame;
  try {
    allocated = 0;
    const bool whole = decode(bytes, frame);
    CHECK(allocated <= 8 * text.size() + 1024);
    if (!whole) {
      CHECK_EQ(bytes.size(), text.size());
      return Outcome::Incomplete;
    }
  } catch (const Error& error) {
    CHECK(allocated <= 8 * text.size() + 4096);  // and the text of the error
    CHECK(error.status().kind == ErrorKind::InvalidArgument);
    CHECK_EQ(bytes.size(), text.size());
    return Outcome::Refused;
  }
  std::string again;
  encode(frame.message, frame.rank, again);
  CHECK_EQ(again.size(), text.size() - bytes.size());
  CHECK(std::memcmp(again.data(), text.data(), again.size()) == 0);
  return Outcome::Valid;
}

void what_is_encoded_is_decoded() {
  Rng rng(1);
  for (int round = 0; round < 2000; ++round) {
    for (size_t type = 0; type < kTypes; ++type) {
      const Message message = random_message(rng, type);
      CHECK_EQ(message.index(), type);
      const int32_t rank = random_int(rng);
      const std::string text = encoded(message, rank);
      std::span<const std::byte> bytes = bytes_of(text);
      Frame frame;
      CHECK(decode(bytes, frame));
      CHECK(bytes.empty());
      CHECK_EQ(frame.rank, rank);
      CHECK(frame.message == message);
    }
  }
}

void frames_follow_each_other() {
  Rng rng(2);
  std::string text;
  std::vector<Message> messages;
  for (int i = 0; i < 100; ++i) {
    messages.push_back(random_message(rng, below(rng, kTypes)));
    encode(messages.back(), i, text);
  }
  std::span<const std::byte> bytes = bytes_of(text);
  Frame frame;
  for (int i = 0; i < 100; ++i) {
    CHECK(decode(bytes, frame));
    CHECK_EQ(frame.rank, i);
    CHECK(frame.message == messages[static_cast<size_t>(i)]);
  }
  CHECK(!decode(bytes, frame));
}

void a_part_of_a_frame_is_not_a_frame() {
  Rng rng(3);
  for (size_t type = 0; type < kTypes; ++type) {
    const std::string text = encoded(random_message(rng, type), 1);
    for (size_t n = 0; n < text.size(); ++n)
      CHECK(try_decode(text.substr(0, n)) == Outcome::Incomplete);
  }
}

void a_shortened_body_is_refused() {
  Rng rng(4);
  for (int round = 0; round < 50; ++round) {
    for (size_t type = 0; type < kTypes; ++type) {
      const std::string whole = encoded(random_message(rng, type), 1);
      for (uint32_t length = 0; length + 4 < whole.size(); ++length) {
        std::string text = whole.substr(0, length + 4);
        std::memcpy(text.data(), &length, sizeof length);
        CHECK(try_decode(text) == Outcome::Refused);
      }
    }
  }
}

void a_lengthened_body_is_refused() {
  Rng rng(5);
  for (size_t type = 0; type < kTypes; ++type) {
    std::string text = encoded(random_message(rng, type), 1) + '\0';
    const auto length = static_cast<uint32_t>(text.size() - 4);
    std::memcpy(text.data(), &length, sizeof length);
    CHECK(try_decode(text) == Outcome::Refused);
  }
}

void flipped_bits_are_harmless() {
  Rng rng(6);
  size_t counts[3] = {};
  for (int round = 0; round < 20000; ++round) {
    for (size_t type = 0; type < kTypes; ++type) {
      std::string text = encoded(random_message(rng, type), 1);
      for (uint64_t n = 1 + below(rng, 3); n > 0; --n) {
        text[below(rng, text.size())] ^= static_cast<char>(1 << below(rng, 8));
      }
      ++counts[static_cast<size_t>(try_decode(text))];
    }
  }
  for (size_t count : counts) CHECK(count > 0);
}

// Every aligned and unaligned place is taken for a length once.
void lying_lengths_are_harmless() {
  Rng rng(7);
  constexpr uint32_t kLies[] = {0,       1,          255,        1 << 16,   1 << 20,
                                1 << 26, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF};
  for (int round = 0; round < 20; ++round) {
    for (size_t type = 0; type < kTypes; ++type) {
      const std::string whole = encoded(random_message(rng, type), 1);
      for (size_t place = 0; place + 4 <= whole.size(); ++place) {
        for (uint32_t lie : kLies) {
          std::string text = whole;
          std::memcpy(text.data() + place, &lie, sizeof lie);
          try_decode(text);
        }
      }
    }
  }
}

void noise_is_harmless() {
  Rng rng(8);
  for (int round = 0; round < 100000; ++round) {
    std::string text = std::string(5, '\0') + random_string(rng, 120);
    const auto length = static_cast<uint32_t>(text.size() - 4);
    std::memcpy(text.data(), &length, sizeof length);
    if (text.size() > 8) text[8] = static_cast<char>(below(rng, kTypes));
    try_decode(text);
  }
}

template <class T>
void refused(T message) {
  std::string out = "before";
  try {
    encode(std::move(message), 0, out);
  } catch (const Error& error) {
    CHECK(error.status().kind == ErrorKind::InvalidArgument);
    CHECK_EQ(out, "before");
    return;
  }
  CHECK(try_decode(out.substr(6)) == Outcome::Refused);
}

void values_the_core_relies_on_are_checked() {
  Request request;
  request.name = "x";
  request.tensors = {{DType::Float32, {-1}}};
  refused(Announce{request, false, 0, {}});
  request.tensors = {{DType::Float64, {int64_t{1} << 30, int64_t{1} << 30}}};
  refused(Announce{request, false, 0, {}});
  request.tensors = {{DType::UInt8, Shape(kMaxDims + 1, 1)}};
  refused(Announce{request, false, 0, {}});
  Entry entry;
  for (std::vector<int32_t> ranks : {std::vector<int32_t>{1, 1}, {2, 1}, {-1}, {1 << 20}}) {
    entry.contributors = ranks;
    refused(entry);
    entry.contributors.clear();
    entry.ranks = ranks;
    refused(entry);
    entry.ranks.clear();
  }
  refused(Blocked{0, std::string(kMaxName + 1, 'x')});
  refused(AnnounceCached{1, false, std::string(kMaxTerms + 1, 'x')});
}

void long_texts_are_cut_between_characters() {
  std::string text(kMaxText - 1, 'x');
  text += "\xC3\xA9";  // the limit is inside this character
  const std::string out = encoded(Leave{text}, 0);
  std::span<const std::byte> bytes = bytes_of(out);
  Frame frame;
  CHECK(decode(bytes, frame));
  CHECK_EQ(std::get<Leave>(frame.message).text, std::string(kMaxText - 1, 'x'));
}

void a_frame_too_long_is_neither_sent_nor_awaited() {
  Request request;
  request.name = "x";
  request.tensors.assign(kMaxTensors, {DType::UInt8, Shape(8, 1)});
  refused(Announce{request, false, 0, {}});
  const uint32_t length = kMaxFrame + 1;
  std::string text(sizeof length, '\0');
  std::memcpy(text.data(), &length, sizeof length);
  CHECK(try_decode(text) == Outcome::Refused);
}

}  // namespace
}  // namespace horovod

int main() {
  using namespace horovod;
  what_is_encoded_is_decoded();
  frames_follow_each_other();
  a_part_of_a_frame_is_not_a_frame();
  a_shortened_body_is_refused();
  a_lengthened_body_is_refused();
  flipped_bits_are_harmless();
  lying_lengths_are_harmless();
  noise_is_harmless();
  values_the_core_relies_on_are_checked();
  long_texts_are_cut_between_characters();
  a_frame_too_long_is_neither_sent_nor_awaited();
}
