// L1: what ranks tell each other about order and agreement, and its one binary form. Must not know
// who sends it where, when, or why.
//
// All integers are little-endian; a string is a u32 length and bytes. decode() never trusts a
// length: every count is checked against the bytes that are there and against the limits below, and
// a malformed message is an Error(InvalidArgument), never a crash or a large allocation. A rank's
// items travel up to the coordinator (rank 0), its decisions travel down.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "types.h"

namespace horovod {

inline constexpr size_t kMaxName = 64 << 10;
inline constexpr size_t kMaxText = 64 << 10;   // longer texts are cut by encode()
inline constexpr size_t kMaxTerms = 64 << 10;  // bytes of an Entry's
inline constexpr size_t kMaxDims = 255;
inline constexpr size_t kMaxTensors = 1 << 20;  // in one grouped call
inline constexpr size_t kMaxRanks = 1 << 20;
inline constexpr size_t kMaxFrame = 64 << 20;  // bytes of one frame after its length

struct TensorSpec {
  DType dtype = DType::UInt8;
  Shape shape;  // of an op with own_rows: without dim 0
  bool operator==(const TensorSpec&) const = default;
};

// One call, as all its members must agree on it. A grouped call is one request with several
// tensors.
struct Request {
  OpKind kind = OpKind::Allreduce;
  ReduceOp op = ReduceOp::Sum;
  bool unnamed = false;  // the name holds a call number: don't cache it
  bool scalar = false;   // some tensor is 0-d in an op with own_rows (whose specs have no dim 0)
  uint32_t set = 0;      // uid of the process set, 0 = all ranks
  int32_t root = 0;      // global rank
  double prescale = 1.0;
  double postscale = 1.0;
  std::string name;
  std::vector<TensorSpec> tensors;
  std::vector<int32_t> ranks;  // AddSet: the members. RemoveSet: empty, `root` is the uid to remove
  bool operator==(const Request&) const = default;
};

// ---- Up: from a rank to the coordinator -------------------------------------------------------

// `blocked`: a caller of this rank waits for it. `payload`: what its tensors hold, end to end, if
// the call is so small that the terms of all may come back with the entry; else empty.
struct Announce {  // the first time, or whenever anything but dim 0 of gathers changed
  Request request;
  bool blocked = false;
  uint64_t resends = 0;  // the id of the Resend that this answers
  std::string payload;
  bool operator==(const Announce&) const = default;
};
struct AnnounceCached {  // an abbreviation of the Request that an Entry gave this id
  uint64_t id = 0;
  bool blocked = false;
  std::string payload;
  bool operator==(const AnnounceCached&) const = default;
};
struct Blocked {  // a caller now waits for something announced before
  uint32_t set = 0;
  std::string name;
  bool operator==(const Blocked&) const = default;
};
struct Reject {  // this rank's matching call failed locally: the others must not wait for it
  OpKind kind = OpKind::Allreduce;
  uint32_t set = 0;
  std::string name;
  std::string text;
  bool operator==(const Reject&) const = default;
};
struct Done {  // from the lowest contributor of an entry that moves data
  uint64_t seq = 0;
  bool operator==(const Done&) const = default;
};
struct Leave {  // this rank shuts down; nothing follows
  std::string text;
  bool operator==(const Leave&) const = default;
};
struct Located {  // answers Locate
  uint64_t id = 0;
  std::string name;  // of the call that `site` is about; empty if this rank made none
  std::string site;  // "train.py:12"; empty if its program isn't known
  bool operator==(const Located&) const = default;
};
using Item = std::variant<Announce, AnnounceCached, Blocked, Reject, Done, Leave, Located>;

// ---- Down: from the coordinator to ranks ------------------------------------------------------

struct EntryItem {
  uint64_t id = 0;   // 0: not cached
  std::string name;  // empty if every contributor announced the id
  bool operator==(const EntryItem&) const = default;
};

// A place in the one global order: every contributor runs it when it is its turn. Calls of one
// entry are fused.
struct Entry {
  uint64_t seq = 0;        // grows by one per entry of the epoch
  uint64_t plan_hash = 0;  // a contributor with another plan must not run it
  OpKind kind = OpKind::Allreduce;
  uint32_t set = 0;
  std::vector<int32_t> contributors;  // global ranks in ascending order
  std::vector<EntryItem> items;
  Status status;               // not ok: an error entry; every contributor's call fails with it
  int64_t value = 0;           // Join: who joined last. AddSet, RemoveSet: the uid
  std::vector<int32_t> ranks;  // AddSet: the members
  // The payloads of all items, end to end, of each contributor in turn: then no data has to follow.
  std::string terms;
  bool operator==(const Entry&) const = default;
};
struct Resend {  // the coordinator no longer knows this id: announce the call in full
  uint64_t id = 0;
  bool operator==(const Resend&) const = default;
};
struct Abort {  // the epoch is over
  Status status;
  bool operator==(const Abort&) const = default;
};
struct Locate {  // where did you make this call or, if it isn't open at yours, your last one?
  uint64_t id = 0;
  uint32_t set = 0;
  std::string name;
  bool operator==(const Locate&) const = default;
};
using Decision = std::variant<Entry, Resend, Abort, Locate>;

// Any peer to any peer, directly: the last thing it says.
struct Goodbye {
  Status status;  // ok: an orderly end. Else why it ends; `rank` is whom that is about (the cause,
                  // not the messenger)
  bool operator==(const Goodbye&) const = default;
};

using Message = std::variant<Announce, AnnounceCached, Blocked, Reject, Done, Leave, Located, Entry,
                             Resend, Abort, Locate, Goodbye>;

// Appends one frame: u32 bytes of what follows, i32 rank, u8 type, body. `rank` is the origin of an
// item and the destination of a decision, so that a host's leader can pass frames on. Throws
// Error(InvalidArgument) for what no decode() would take, and leaves `out` as it was.
void encode(const Message& message, int32_t rank, std::string& out);
void encode_item(const Item& item, int32_t rank, std::string& out);
void encode_decision(const Decision& decision, int32_t rank, std::string& out);

// Gives an encoded frame another rank: a decision is encoded once for all its destinations.
void readdress(std::string& frame, int32_t rank);

struct Frame {
  int32_t rank = 0;
  Message message;
};

// Takes the first whole frame off `bytes`; false, and nothing taken, if it isn't there as a whole
// yet. Throws Error(InvalidArgument).
bool decode(std::span<const std::byte>& bytes, Frame& frame);

}  // namespace horovod
