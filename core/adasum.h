// L3: Adasum, the sum of vectors that counts what they have in common only once: which vectors are
// merged, with which factors, on this rank's chunks. Must not know transports or schedules.
//
// Of two vectors a and b, made of wa and wb ranks' (Maleki et al., "Scaling Distributed Training
// with Adaptive Summation", arXiv:2006.02924, there with wa = wb):
//
//   f = (1 - alpha (a.b)/|a|^2) a + (1 - beta (a.b)/|b|^2) b
//
// Orthogonal vectors are added, whatever alpha and beta are. Parallel ones, a = s u and b = t u,
// give
//
//   f = ((s - alpha t) + (t - beta s)) u = ((1 - beta) s + (1 - alpha) t) u
//
// and this is their average over ranks, (wa s + wb t)/(wa + wb), for all s and t exactly if
//
//   alpha = wa/(wa + wb)   and   beta = wb/(wa + wb).
//
// Equal vectors are the case s = t: f = a. With wa = wb both are 1/2, as in the paper. Pairs are
// (0,1), (2,3), ..., then pairs of pairs, and so on; an odd one out is the last of its level and
// goes up as it is, which is where wa and wb differ.
//
// No merged vector is ever stored. Each is a linear combination of the ranks' own vectors, so one
// factor per rank and tensor says it all, and elements are combined in double whenever they are
// needed. A level of the tree costs a pass over the data for the products a.b, |a|^2 and |b|^2.
// (Taking them from the products of all pairs of ranks would need one pass, but cancels: the norm
// of a merged vector may be far smaller than those it is made of.) The scale factors are factors
// too. The last pass computes the result, rounded once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels.h"
#include "types.h"

namespace horovod {

// A pair of one level: ranks [first, middle) are merged with ranks [middle, last).
struct AdasumPair {
  size_t first = 0, middle = 0, last = 0;
  bool operator==(const AdasumPair&) const = default;
};

// The levels for `n` ranks.
std::vector<std::vector<AdasumPair>> adasum_levels(size_t n);

// Turns the factors of the ranks of two vectors into those of the merged vector; `factors` are by
// rank. A vector too small for its square to be a number counts as zero: the other is unchanged.
void adasum_merge(const AdasumPair& pair, const Products& products, std::span<double> factors);

// One rank's share of the work. What multiply() and combine() do in one call is bounded, some
// milliseconds, whatever the sizes.
class Adasum {
 public:
  // This rank's chunk of one tensor.
  struct Chunk {
    std::vector<const std::byte*> terms;  // by rank: its values of the chunk
    std::byte* out = nullptr;             // may be one of them
    DType dtype = DType::Float32;
    uint64_t count = 0;
  };

  Adasum(const Kernels& kernels, std::vector<Chunk> chunks, size_t ranks);

  void scale(double factor);  // what is merged so far

  bool merged() const { return level_ == levels_.size(); }

  // Goes on with the products of this level; whether they are complete.
  bool multiply();
  // Of this rank's chunks; Products by tensor and pair, as plain numbers. They may be written to:
  // the next level starts anew.
  std::vector<double>& products() { return products_; }
  // Ends the level. `all` are everybody's products() in rank order.
  void merge(std::span<const double> all);
  // Once merged: goes on with the results; whether they are complete.
  bool combine();

 private:
  // Calls work(tensor, begin, count) for the next blocks; whether the last one was among them.
  template <typename Work>
  bool advance(Work&& work);
  // Of ranks [first, last), for the elements from `begin` on.
  Combination combination(size_t tensor, uint64_t begin, size_t first, size_t last);
  void start_level();

  const Kernels& kernels_;
  std::vector<Chunk> chunks_;
  size_t ranks_;
  std::vector<std::vector<AdasumPair>> levels_;
  size_t level_ = 0;
  std::vector<double> factors_;   // by tensor and rank
  std::vector<double> products_;  // by tensor, pair and place in Products
  size_t tensor_ = 0;             // how far multiply() or combine() has come
  uint64_t element_ = 0;
  std::vector<const std::byte*> terms_;  // scratch of combination(), by rank
};

}  // namespace horovod
