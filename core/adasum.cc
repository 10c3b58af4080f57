// L3: Adasum. Must not know transports or schedules.

#include "adasum.h"

#include <algorithm>
#include <utility>

namespace horovod {
namespace {

// A block is what one call of a kernel gets: its products are summed, so it also fixes their
// association. A call of advance() does some kBudget terms of elements.
constexpr uint64_t kBlock = 64 << 10;
constexpr uint64_t kBudget = 1 << 20;

constexpr double kTiny = 0x1p-511;  // the root of the least normal double

constexpr size_t kNumbers = 3;  // in Products

double factor(double share, double dot, double square) {
  return square < kTiny ? 1.0 : 1.0 - share * dot / square;  // NaN stays NaN
}

}  // namespace

std::vector<std::vector<AdasumPair>> adasum_levels(size_t n) {
  std::vector<std::vector<AdasumPair>> levels;
  for (size_t width = 1; width < n; width *= 2) {
    std::vector<AdasumPair>& pairs = levels.emplace_back();
    for (size_t first = 0; first + width < n; first += 2 * width) {
      pairs.push_back({first, first + width, std::min(first + 2 * width, n)});
    }
  }
  return levels;
}

void adasum_merge(const AdasumPair& pair, const Products& products, std::span<double> factors) {
  const auto ranks = static_cast<double>(pair.last - pair.first);
  const double alpha = static_cast<double>(pair.middle - pair.first) / ranks;
  const double beta = static_cast<double>(pair.last - pair.middle) / ranks;
  const double of_x = factor(alpha, products.xy, products.xx);
  const double of_y = factor(beta, products.xy, products.yy);
  for (size_t r = pair.first; r < pair.last; ++r) factors[r] *= r < pair.middle ? of_x : of_y;
}

Adasum::Adasum(const Kernels& kernels, std::vector<Chunk> chunks, size_t ranks)
    : kernels_(kernels),
      chunks_(std::move(chunks)),
      ranks_(ranks),
      levels_(adasum_levels(ranks)),
      factors_(chunks_.size() * ranks, 1.0),
      terms_(ranks) {
  start_level();
}

void Adasum::scale(double by) {
  for (double& factor : factors_) factor *= by;
}

void Adasum::start_level() {
  tensor_ = 0;
  element_ = 0;
  if (!merged()) products_.assign(chunks_.size() * levels_[level_].size() * kNumbers, 0.0);
}

template <typename Work>
bool Adasum::advance(Work&& work) {
  for (uint64_t done = 0; tensor_ < chunks_.size(); ++tensor_, element_ = 0) {
    while (element_ < chunks_[tensor_].count) {
      if (done >= kBudget) return false;
      const uint64_t count = std::min(kBlock, chunks_[tensor_].count - element_);
      work(tensor_, element_, count);
      element_ += count;
      done += count * ranks_;
    }
  }
  return true;
}

Combination Adasum::combination(size_t tensor, uint64_t begin, size_t first, size_t last) {
  const Chunk& chunk = chunks_[tensor];
  for (size_t r = first; r < last; ++r) {
    terms_[r] = chunk.terms[r] + begin * info(chunk.dtype).size;
  }
  return {terms_.data() + first, factors_.data() + tensor * ranks_ + first, last - first};
}

bool Adasum::multiply() {
  const std::vector<AdasumPair>& pairs = levels_[level_];
  return advance([&](size_t tensor, uint64_t begin, uint64_t count) {
    double* sums = products_.data() + tensor * pairs.size() * kNumbers;
    for (const AdasumPair& pair : pairs) {
      const Products block = kernels_.products(
          chunks_[tensor].dtype, combination(tensor, begin, pair.first, pair.middle),
          combination(tensor, begin, pair.middle, pair.last), count);
      *sums++ += block.xy;
      *sums++ += block.xx;
      *sums++ += block.yy;
    }
  });
}

void Adasum::merge(std::span<const double> all) {
  // Everybody adds in rank order, so everybody has the same factors.
  std::fill(products_.begin(), products_.end(), 0.0);
  for (size_t i = 0; i < all.size(); ++i) products_[i % products_.size()] += all[i];
  const double* sums = products_.data();
  for (size_t tensor = 0; tensor < chunks_.size(); ++tensor) {
    const std::span factors(factors_.data() + tensor * ranks_, ranks_);
    for (const AdasumPair& pair : levels_[level_]) {
      adasum_merge(pair, {sums[0], sums[1], sums[2]}, factors);
      sums += kNumbers;
    }
  }
  ++level_;
  start_level();
}

bool Adasum::combine() {
  return advance([&](size_t tensor, uint64_t begin, uint64_t count) {
    const Chunk& chunk = chunks_[tensor];
    kernels_.combine(chunk.dtype, chunk.out + begin * info(chunk.dtype).size,
                     combination(tensor, begin, 0, ranks_), count);
  });
}

}  // namespace horovod
