// L1: the binary form of wire.h's messages. Must not know who sends it where, when, or why.
#include "wire.h"

#include <bit>
#include <concepts>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

namespace horovod {
namespace {

static_assert(std::endian::native == std::endian::little, "numbers are sent as they lie in memory");

[[noreturn]] void refuse(const std::string& why) {
  throw Error(ErrorKind::InvalidArgument, "control message: " + why);
}

// The longest prefix of `text` that fits and doesn't end inside a UTF-8 character.
std::string_view cut(std::string_view text, size_t limit) {
  if (text.size() <= limit) return text;
  while (limit > 0 && (static_cast<unsigned char>(text[limit]) & 0xC0) == 0x80) --limit;
  return text.substr(0, limit);
}

// A message is described once, by a fields() below. Writer and Reader walk the same description, so
// the two directions can't drift apart.

class Writer {
 public:
  static constexpr bool kReads = false;

  explicit Writer(std::string& out) : out_(out) {}

  template <class T>
  void number(const T& value) {
    char bytes[sizeof value];
    std::memcpy(bytes, &value, sizeof value);
    out_.append(bytes, sizeof value);
  }
  void flag(bool value) { number(static_cast<uint8_t>(value)); }
  template <class E>
  void choice(E value, size_t) {
    number(static_cast<uint8_t>(value));
  }
  void name(std::string_view value) {
    if (value.size() > kMaxName) {
      refuse("a name of " + std::to_string(value.size()) + " bytes; the limit is " +
             std::to_string(kMaxName));
    }
    bytes(value);
  }
  void text(std::string_view value) { bytes(cut(value, kMaxText)); }
  void data(std::string_view value) {
    if (value.size() > kMaxTerms) refuse(std::to_string(value.size()) + " bytes of data");
    bytes(value);
  }
  template <class T, class Each>
  void list(const std::vector<T>& values, size_t limit, size_t, Each each) {
    if (values.size() > limit) refuse("a list of " + std::to_string(values.size()) + " elements");
    number(static_cast<uint32_t>(values.size()));
    for (const T& value : values) each(*this, value);
  }

 private:
  void bytes(std::string_view value) {
    number(static_cast<uint32_t>(value.size()));
    out_.append(value);
  }

  std::string& out_;
};

class Reader {
 public:
  static constexpr bool kReads = true;

  explicit Reader(std::span<const std::byte> in) : in_(in) {}

  template <class T>
  void number(T& value) {
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
  }
  void flag(bool& value) {
    uint8_t byte = 0;
    number(byte);
    if (byte > 1) refuse("a flag that is " + std::to_string(byte));
    value = byte != 0;
  }
  template <class E>
  void choice(E& value, size_t count) {
    uint8_t byte = 0;
    number(byte);
    if (byte >= count) refuse("an unknown code " + std::to_string(byte));
    value = static_cast<E>(byte);
  }
  void name(std::string& value) { bytes(value, kMaxName); }
  void text(std::string& value) { bytes(value, kMaxText); }
  void data(std::string& value) { bytes(value, kMaxTerms); }
  // `least`: the fewest bytes an element can take, so that no count makes us allocate more than a
  // small multiple of what was received.
  template <class T, class Each>
  void list(std::vector<T>& values, size_t limit, size_t least, Each each) {
    uint32_t count = 0;
    number(count);
    if (count > limit || count > in_.size() / least) {
      refuse("a list of " + std::to_string(count) + " elements in " + std::to_string(in_.size()) +
             " bytes");
    }
    values.resize(count);
    for (T& value : values) each(*this, value);
  }
  void end() const {
    if (!in_.empty()) refuse(std::to_string(in_.size()) + " bytes too many");
  }

 private:
  std::span<const std::byte> take(size_t count) {
    if (count > in_.size()) refuse("it ends too early");
    const auto taken = in_.first(count);
    in_ = in_.subspan(count);
    return taken;
  }
  void bytes(std::string& value, size_t limit) {
    uint32_t count = 0;
    number(count);
    if (count > limit) refuse("a string of " + std::to_string(count) + " bytes");
    const auto taken = take(count);
    value.assign(reinterpret_cast<const char*>(taken.data()), taken.size());
  }

  std::span<const std::byte> in_;
};

// What the rest of the core takes for granted about received values.

void check_shape(const TensorSpec& spec) {
  uint64_t bytes = info(spec.dtype).size;
  bool empty = false;
  for (int64_t dim : spec.shape) {
    if (dim < 0) refuse("a negative dimension");
    empty |= dim == 0;
  }
  for (int64_t dim : spec.shape) {
    if (empty) break;
    if (static_cast<uint64_t>(dim) > std::numeric_limits<int64_t>::max() / bytes) {
      refuse("a tensor of more than 2^63 bytes");
    }
    bytes *= static_cast<uint64_t>(dim);
  }
}

void check_ranks(const std::vector<int32_t>& ranks) {
  int32_t last = -1;
  for (int32_t rank : ranks) {
    if (rank <= last || rank >= static_cast<int32_t>(kMaxRanks)) {
      refuse("ranks out of order or out of range");
    }
    last = rank;
  }
}

template <class T, class U>
concept Like = std::same_as<std::remove_const_t<T>, U>;

constexpr auto kNumber = [](auto& ar, auto& value) { ar.number(value); };
constexpr auto kFields = [](auto& ar, auto& value) { fields(ar, value); };

template <class Ar, Like<Status> M>
void fields(Ar& ar, M& m) {
  ar.choice(m.kind, kErrorKinds);
  ar.text(m.text);
  ar.number(m.rank);
}

template <class Ar, Like<TensorSpec> M>
void fields(Ar& ar, M& m) {
  ar.choice(m.dtype, kDTypes.size());
  ar.list(m.shape, kMaxDims, 8, kNumber);
  if constexpr (Ar::kReads) check_shape(m);
}

template <class Ar, Like<Request> M>
void fields(Ar& ar, M& m) {
  ar.choice(m.kind, kOps.size());
  ar.choice(m.op, kReduceOps.size());
  ar.flag(m.unnamed);
  ar.flag(m.scalar);
  ar.number(m.set);
  ar.number(m.root);
  ar.number(m.prescale);
  ar.number(m.postscale);
  ar.name(m.name);
  ar.list(m.tensors, kMaxTensors, 5, kFields);
  ar.list(m.ranks, kMaxRanks, 4, kNumber);
}

template <class Ar, Like<Announce> M>
void fields(Ar& ar, M& m) {
  fields(ar, m.request);
  ar.flag(m.blocked);
  ar.number(m.resends);
  ar.data(m.payload);
}

template <class Ar, Like<AnnounceCached> M>
void fields(Ar& ar, M& m) {
  ar.number(m.id);
  ar.flag(m.blocked);
  ar.data(m.payload);
}

template <class Ar, Like<Blocked> M>
void fields(Ar& ar, M& m) {
  ar.number(m.set);
  ar.name(m.name);
}

template <class Ar, Like<Reject> M>
void fields(Ar& ar, M& m) {
  ar.choice(m.kind, kOps.size());
  ar.number(m.set);
  ar.name(m.name);
  ar.text(m.text);
}

template <class Ar, Like<Done> M>
void fields(Ar& ar, M& m) {
  ar.number(m.seq);
}

template <class Ar, Like<Leave> M>
void fields(Ar& ar, M& m) {
  ar.text(m.text);
}

template <class Ar, Like<Located> M>
void fields(Ar& ar, M& m) {
  ar.number(m.id);
  ar.name(m.name);
  ar.text(m.site);
}

template <class Ar, Like<EntryItem> M>
void fields(Ar& ar, M& m) {
  ar.number(m.id);
  ar.name(m.name);
}

template <class Ar, Like<Entry> M>
void fields(Ar& ar, M& m) {
  ar.number(m.seq);
  ar.number(m.plan_hash);
  ar.choice(m.kind, kOps.size());
  ar.number(m.set);
  ar.list(m.contributors, kMaxRanks, 4, kNumber);
  ar.list(m.items, kMaxTensors, 12, kFields);
  fields(ar, m.status);
  ar.number(m.value);
  ar.list(m.ranks, kMaxRanks, 4, kNumber);
  ar.data(m.terms);
  if constexpr (Ar::kReads) {
    check_ranks(m.contributors);
    check_ranks(m.ranks);
  }
}

template <class Ar, Like<Resend> M>
void fields(Ar& ar, M& m) {
  ar.number(m.id);
}

template <class Ar, Like<Abort> M>
void fields(Ar& ar, M& m) {
  fields(ar, m.status);
}

template <class Ar, Like<Locate> M>
void fields(Ar& ar, M& m) {
  ar.number(m.id);
  ar.number(m.set);
  ar.name(m.name);
}

template <class Ar, Like<Goodbye> M>
void fields(Ar& ar, M& m) {
  fields(ar, m.status);
}

constexpr std::make_index_sequence<std::variant_size_v<Message>> kTypes;

// The type code of a message is its place in the variant.
template <class M, size_t... I>
constexpr uint8_t type_of(std::index_sequence<I...>) {
  return static_cast<uint8_t>(
      ((std::same_as<M, std::variant_alternative_t<I, Message>> ? I : 0) + ...));
}
template <size_t... I>
void read_as(size_t type, Reader& reader, Message& message, std::index_sequence<I...>) {
  const bool known = ((type == I && (fields(reader, message.template emplace<I>()), true)) || ...);
  if (!known) refuse("an unknown type " + std::to_string(type));
}

// A message of any of the variants.
template <class Variant>
void append(const Variant& message, int32_t rank, std::string& out) {
  const size_t start = out.size();
  try {
    Writer writer(out);
    writer.number(uint32_t{0});
    writer.number(rank);
    std::visit(
        [&]<class M>(const M& m) {
          writer.number(type_of<M>(kTypes));
          fields(writer, m);
        },
        message);
    const size_t bytes = out.size() - start - sizeof(uint32_t);
    if (bytes > kMaxFrame) refuse("a frame of " + std::to_string(bytes) + " bytes");
    const auto length = static_cast<uint32_t>(bytes);
    std::memcpy(out.data() + start, &length, sizeof length);
  } catch (...) {
    out.resize(start);
    throw;
  }
}

}  // namespace

void encode(const Message& message, int32_t rank, std::string& out) { append(message, rank, out); }
void encode_item(const Item& item, int32_t rank, std::string& out) { append(item, rank, out); }
void encode_decision(const Decision& decision, int32_t rank, std::string& out) {
  append(decision, rank, out);
}

void readdress(std::string& frame, int32_t rank) {
  std::memcpy(frame.data() + sizeof(uint32_t), &rank, sizeof rank);
}

bool decode(std::span<const std::byte>& bytes, Frame& frame) {
  uint32_t length = 0;
  if (bytes.size() < sizeof length) return false;
  std::memcpy(&length, bytes.data(), sizeof length);
  if (length > kMaxFrame) refuse("a frame of " + std::to_string(length) + " bytes");
  if (bytes.size() - sizeof length < length) return false;

  Reader reader(bytes.subspan(sizeof length, length));
  uint8_t type = 0;
  reader.number(frame.rank);
  reader.number(type);
  read_as(type, reader, frame.message, kTypes);
  reader.end();
  bytes = bytes.subspan(sizeof length + length);
  return true;
}

}  // namespace horovod
