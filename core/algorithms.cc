// L3: the algorithms. Must not know transports or engines.

#include "algorithms.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "types.h"

namespace horovod {
namespace {

constexpr int32_t kRotate = 4;  // how many peers a pairwise exchange has in flight: see alltoall

// Collects steps; knows the two shapes of peer sets that all algorithms use.
class Builder {
 public:
  explicit Builder(const Place& place) : place_(place) {
    for (int32_t k = 1; k < place.size; ++k) {
      schedule_.peers.push_back((place.rank + k) % place.size);
    }
    others_ = static_cast<uint32_t>(schedule_.peers.size());
  }

  int32_t send_to_others(uint64_t in, uint64_t bytes) {
    return add({.kind = StepKind::Send, .in = in, .bytes = bytes, .peers = others_});
  }
  int32_t send(int32_t to, uint64_t in, uint64_t bytes) {
    return add(
        {.kind = StepKind::Send, .in = in, .bytes = bytes, .first_peer = at(to), .peers = 1});
  }
  void store(int32_t from, uint64_t out, uint64_t bytes) {
    add({.kind = StepKind::Store, .out = out, .bytes = bytes, .first_peer = at(from), .peers = 1});
  }
  void fold(uint64_t in, uint64_t out, uint64_t bytes, bool forward, int32_t after = -1) {
    add({.kind = StepKind::Fold,
         .forward = forward,
         .in = in,
         .out = out,
         .bytes = bytes,
         .peers = others_,
         .after = after});
  }
  void copy(uint64_t in, uint64_t out, uint64_t bytes) {
    add({.kind = StepKind::Copy, .in = in, .out = out, .bytes = bytes});
  }

  Schedule take() { return std::move(schedule_); }

 private:
  // Index in `peers`, which starts at the next rank and goes round.
  uint32_t at(int32_t peer) const {
    return static_cast<uint32_t>((peer - place_.rank - 1 + place_.size) % place_.size);
  }
  // Both sides of an empty transfer skip it, so every slot carries something.
  int32_t add(const Step& step) {
    if (step.bytes == 0) return -1;
    const bool alone = step.kind == StepKind::Send && step.peers == 0;
    if (alone) return -1;
    schedule_.steps.push_back(step);
    return static_cast<int32_t>(schedule_.steps.size()) - 1;
  }

  const Place& place_;
  uint32_t others_ = 0;
  Schedule schedule_;
};

struct Piece {
  uint64_t begin = 0, bytes = 0;
};

// Segment `s` of a chunk; empty past its end.
Piece segment(uint64_t chunk_begin, uint64_t chunk_bytes, uint64_t s, uint64_t segment_bytes) {
  const uint64_t at = std::min(s * segment_bytes, chunk_bytes);
  return {chunk_begin + at, std::min(segment_bytes, chunk_bytes - at)};
}

uint64_t segments_of(uint64_t bytes, uint64_t segment_bytes) {
  return (bytes + segment_bytes - 1) / segment_bytes;
}

std::vector<uint64_t> offsets_of(std::span<const uint64_t> chunks) {
  std::vector<uint64_t> offsets(chunks.size() + 1, 0);
  std::partial_sum(chunks.begin(), chunks.end(), offsets.begin() + 1);
  return offsets;
}

// Rank r's part of a stretch of `bytes`: as even as kAlignment allows.
Piece chunk_of(uint64_t bytes, int32_t r, int32_t size) {
  const uint64_t lines = bytes / kAlignment;
  const auto n = static_cast<uint64_t>(size), k = static_cast<uint64_t>(r);
  const uint64_t begin = lines * k / n, end = lines * (k + 1) / n;
  return {begin * kAlignment, (end - begin) * kAlignment};
}

}  // namespace

// Everyone sends everything to everyone and folds all of it. One latency, (n-1) x bytes read by
// each rank: for payloads so small that a second exchange costs more than the extra arithmetic.
Schedule allreduce_direct(const Place& place, uint64_t bytes) {
  Builder b(place);
  for (uint64_t s = 0; s < segments_of(bytes, place.segment_bytes); ++s) {
    const Piece p = segment(0, bytes, s, place.segment_bytes);
    const int32_t sent = b.send_to_others(p.begin, p.bytes);
    b.fold(p.begin, p.begin, p.bytes, false, sent);  // the output may be the input: send it first
  }
  return b.take();
}

// Reduce-scatter, then allgather, segment by segment. Of each segment rank r owns one chunk: it
// gets that chunk from all, folds it and forwards the result. Each rank writes and reads 2 (n-1)/n
// x bytes, the least that an allreduce can do (Patarasuk and Yuan, doi:10.1016/j.jpdc.2008.09.002),
// in two latencies a segment; the chunks of segment s+1 are on their way while those of segment s
// are folded, and those of s+1 are folded before the results of s are fetched.
Schedule allreduce_chunked(const Place& place, uint64_t bytes) {
  Builder b(place);
  const uint64_t segments = segments_of(bytes, place.segment_bytes);
  const auto chunk = [&](uint64_t s, int32_t r) {
    const Piece whole = segment(0, bytes, s, place.segment_bytes);
    const Piece part = chunk_of(whole.bytes, r, place.size);
    return Piece{whole.begin + part.begin, part.bytes};
  };
  const auto scatter = [&](uint64_t s) {
    for (int32_t k = 1; k < place.size; ++k) {
      const int32_t to = (place.rank + k) % place.size;
      b.send(to, chunk(s, to).begin, chunk(s, to).bytes);
    }
  };
  const auto fold = [&](uint64_t s) {
    const Piece own = chunk(s, place.rank);
    b.fold(own.begin, own.begin, own.bytes, true);
  };
  const auto gather = [&](uint64_t s) {
    for (int32_t k = 1; k < place.size; ++k) {
      const int32_t from = (place.rank - k + place.size) % place.size;
      b.store(from, chunk(s, from).begin, chunk(s, from).bytes);
    }
  };
  // scatter(s) before fold(s-1) before gather(s-2), on every rank: the same order on each pair.
  for (uint64_t s = 0; s < segments + 2; ++s) {
    if (s < segments) scatter(s);
    if (s >= 1 && s - 1 < segments) fold(s - 1);
    if (s >= 2) gather(s - 2);
  }
  return b.take();
}

// Pairwise: every rank sends each owner its chunk and folds its own. (n-1)/n x bytes each way. A
// fold waits for all ranks and a rank writes to one after the other, so the pieces for all owners
// together must fit where one segment fits: else everyone would wait for room that only everyone's
// folds can free.
Schedule reducescatter(const Place& place, std::span<const uint64_t> chunks) {
  Builder b(place);
  const auto offsets = offsets_of(chunks);
  const uint64_t longest = *std::max_element(chunks.begin(), chunks.end());
  const uint64_t lines = place.segment_bytes / kAlignment / static_cast<uint64_t>(place.size);
  const uint64_t piece_bytes = std::max<uint64_t>(lines, 1) * kAlignment;
  const auto part = [&](uint64_t s, int32_t r) {
    return segment(offsets[r], chunks[r], s, piece_bytes);
  };
  for (uint64_t s = 0; s < segments_of(longest, piece_bytes); ++s) {
    for (int32_t k = 1; k < place.size; ++k) {
      const int32_t to = (place.rank + k) % place.size;
      b.send(to, part(s, to).begin, part(s, to).bytes);
    }
    const Piece own = part(s, place.rank);
    b.fold(own.begin, own.begin - offsets[place.rank], own.bytes, false);
  }
  return b.take();
}

// Every rank writes its chunk once for all to read. (n-1) x chunk bytes read by each.
Schedule allgather(const Place& place, std::span<const uint64_t> chunks) {
  Builder b(place);
  const auto offsets = offsets_of(chunks);
  const uint64_t longest = *std::max_element(chunks.begin(), chunks.end());
  for (uint64_t s = 0; s < segments_of(longest, place.segment_bytes); ++s) {
    const Piece own = segment(0, chunks[place.rank], s, place.segment_bytes);
    b.send_to_others(own.begin, own.bytes);
    b.copy(own.begin, offsets[place.rank] + own.begin, own.bytes);
    for (int32_t k = 1; k < place.size; ++k) {
      const int32_t from = (place.rank - k + place.size) % place.size;
      const Piece theirs = segment(offsets[from], chunks[from], s, place.segment_bytes);
      b.store(from, theirs.begin, theirs.bytes);
    }
  }
  return b.take();
}

// The root writes once, all others read. One latency and bytes/segment_bytes slots.
Schedule broadcast(const Place& place, int32_t root, uint64_t bytes) {
  Builder b(place);
  for (uint64_t s = 0; s < segments_of(bytes, place.segment_bytes); ++s) {
    const Piece p = segment(0, bytes, s, place.segment_bytes);
    if (place.rank == root) {
      b.send_to_others(p.begin, p.bytes);
      b.copy(p.begin, p.begin, p.bytes);
    } else {
      b.store(root, p.begin, p.bytes);
    }
  }
  return b.take();
}

// Pairwise exchange with rotating partners: in turn k rank r sends to r+k and receives from r-k, so
// that no receiver is swamped. At most kRotate partners a block are in flight: their segments are
// interleaved, the next block follows. (n-1)/n x bytes each way.
Schedule alltoall(const Place& place, std::span<const uint64_t> to,
                  std::span<const uint64_t> from) {
  Builder b(place);
  const auto out_offsets = offsets_of(from), in_offsets = offsets_of(to);
  b.copy(in_offsets[place.rank], out_offsets[place.rank], to[place.rank]);
  for (int32_t first = 1; first < place.size; first += kRotate) {
    const int32_t last = std::min(first + kRotate, place.size);
    uint64_t longest = 0;
    for (int32_t k = first; k < last; ++k) {
      longest = std::max({longest, to[(place.rank + k) % place.size],
                          from[(place.rank - k + place.size) % place.size]});
    }
    for (uint64_t s = 0; s < segments_of(longest, place.segment_bytes); ++s) {
      for (int32_t k = first; k < last; ++k) {
        const int32_t dest = (place.rank + k) % place.size;
        const Piece p = segment(in_offsets[dest], to[dest], s, place.segment_bytes);
        b.send(dest, p.begin, p.bytes);
      }
      for (int32_t k = first; k < last; ++k) {
        const int32_t source = (place.rank - k + place.size) % place.size;
        const Piece p = segment(out_offsets[source], from[source], s, place.segment_bytes);
        b.store(source, p.begin, p.bytes);
      }
    }
  }
  return b.take();
}

}  // namespace horovod
