// Blocks of numbers: where they lie in a bucket of tensors, and what all codecs of blocks share.
//
// The results are, bit for bit, those of the TensorFlow operations that are compiled by XLA where
// this library is missing: so products are added by fma exactly where XLA's compiler does so.

#ifndef TFDML_BLOCKS_H_
#define TFDML_BLOCKS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

namespace tfdml {

// What is done with the numbers that bytes stand for.
enum class Into { kSet, kAdd };

// Several tensors as one row of numbers, of which blocks may reach over several tensors.
class Bucket {
 public:
  explicit Bucket(const std::vector<int64_t>& sizes) {
    int64_t end = 0;
    for (int64_t size : sizes) ends_.push_back(end += size);
  }

  int64_t size() const { return ends_.empty() ? 0 : ends_.back(); }

  // Calls `visit(tensor, its first number, the place in the block, how many)` for each part of a
  // block; what is behind the last tensor is left out.
  template <typename Visit>
  void Parts(int64_t first, int64_t count, Visit visit) const {
    const int64_t last = std::min(first + count, size());
    size_t tensor = std::upper_bound(ends_.begin(), ends_.end(), first) - ends_.begin();
    for (int64_t at = first; at < last; ++tensor) {
      const int64_t begin = tensor == 0 ? 0 : ends_[tensor - 1];
      const int64_t end = std::min(last, ends_[tensor]);
      if (end > at) visit(tensor, at - begin, at - first, end - at);
      at = std::max(at, end);
    }
  }

  // Returns where a block is if it is in one tensor as a whole, `elsewhere` if not.
  float* Whole(const std::vector<float*>& tensors, int64_t first, int64_t count,
               float* elsewhere) const {
    if (tensors.empty()) return elsewhere;
    Parts(first, count, [&](size_t tensor, int64_t from, int64_t, int64_t part) {
      if (part == count) elsewhere = tensors[tensor] + from;
    });
    return elsewhere;
  }

 private:
  std::vector<int64_t> ends_;
};

// One encoded row: what blocks have of their own first, then all numbers' codes.
struct Row {
  uint8_t* bytes;
  int64_t blocks;
};

// Random numbers follow from these and a number's place, as `packing.noise` says.
struct Seed {
  uint32_t first;
  uint32_t second;
};

inline uint32_t Mixed(uint32_t bits) {
  bits = (bits ^ (bits >> 16)) * 0x85EBCA6Bu;
  bits = (bits ^ (bits >> 13)) * 0xC2B2AE35u;
  return bits ^ (bits >> 16);
}

inline float BitsToFloat(int32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline int32_t FloatToBits(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

constexpr int32_t kInfinity = 0x7F800000, kOne = 0x3F800000;

// Returns a number from 0 to below 1 for a place.
inline float Noise(uint32_t place, uint32_t one, uint32_t two) {
  const uint32_t hashed = Mixed(Mixed(place + one) + two);
  return BitsToFloat(static_cast<int32_t>(hashed >> 9) | kOne) - 1.0f;
}

// Returns what `Noise` takes instead of the two parts of a seed.
inline Seed Prepared(Seed seed) {
  return {Mixed(seed.first + 0x9E3779B9u), Mixed(seed.second + 0x9E3779B9u)};
}

// Returns what stands for 1 where a block's numbers up to 1 are summed as whole numbers: such sums
// do not depend on the order in which they are made.
inline float WholeOne(int64_t block) {
  return static_cast<float>(int64_t{1} << static_cast<int>(30 - std::ceil(std::log2(block))));
}

// Returns the bits of the largest size of some numbers.
inline int32_t LargestBits(const float* values, int64_t count) {
  int32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    largest = std::max(largest, FloatToBits(values[i]) & 0x7FFFFFFF);
  }
  return largest;
}

// Returns the largest size of a number, NaN if one is not finite.
inline float LargestOrNan(const float* values, int64_t count) {
  const int32_t bits = LargestBits(values, count);
  return bits < kInfinity ? BitsToFloat(bits) : std::numeric_limits<float>::quiet_NaN();
}

// Returns the sum of the squares of a block's numbers over `largest`: the same numbers as
// `packing.sums_of_squares`.
inline float SumOfSquares(const float* values, int64_t block, float largest) {
  const int low_bits = std::min(15, 30 - static_cast<int>(std::ceil(std::log2(block))));
  const float one = std::ldexp(1.0f, 2 * low_bits);
  const int32_t mask = (1 << low_bits) - 1;
  int32_t high = 0, low = 0;
  for (int64_t i = 0; i < block; ++i) {
    const float unit = largest == 0.0f ? 0.0f : values[i] / largest;
    const int32_t whole = static_cast<int32_t>(std::nearbyint(unit * unit * one));
    high += whole >> low_bits;
    low += whole & mask;
  }
  const float sums = static_cast<float>(high) * std::ldexp(1.0f, low_bits) + static_cast<float>(low);
  return sums / one;
}

// Packs codes of some bits into bytes: the first of each part of a block share a byte, and so on.
inline void Pack(const uint8_t* codes, int64_t block, int bits, uint8_t* bytes) {
  const int64_t apart = block * bits / 8;
  std::memcpy(bytes, codes, apart);
  for (int part = 1; part < 8 / bits; ++part) {
    const uint8_t* next = codes + part * apart;
    const int shift = part * bits;
    for (int64_t i = 0; i < apart; ++i) bytes[i] |= static_cast<uint8_t>(next[i] << shift);
  }
}

template <Into kInto>
inline void PutProduct(float a, float b, float* to) {
  if (kInto == Into::kSet) *to = a * b;
  if (kInto == Into::kAdd) *to = std::fma(a, b, *to);
}

template <Into kInto>
inline void Put(float value, float* to) {
  if (kInto == Into::kSet) *to = value;
  if (kInto == Into::kAdd) *to += value;
}

// Where a codec's bytes are: for each block some floats, and a number's codes.
//
// A codec has these functions:
//   Encode(values, row, number, first, seed)  encodes block `number` of a row and leaves in `values`
//                                             what that leaves out, if the codec is biased; `first`
//                                             is the place of its first number, for random numbers
//   Decode<into>(row, number, to)             puts the numbers of the block into `to`
class BlockCodec {
 public:
  // Returns the bytes of a row of some blocks.
  int64_t RowBytes(int64_t blocks) const { return blocks * (4 * floats_ + block_ * bits_ / 8); }

 protected:
  BlockCodec(int64_t block, int floats, int bits) : block_(block), floats_(floats), bits_(bits) {}

  int64_t block() const { return block_; }
  int bits() const { return bits_; }

  uint8_t* Codes(Row row, int64_t number) const {
    return row.bytes + 4 * floats_ * row.blocks + number * block_ * bits_ / 8;
  }

  static void PutFloat(Row row, int64_t number, float value) {
    std::memcpy(row.bytes + 4 * number, &value, 4);
  }

  static float Float(Row row, int64_t number) {
    float value;
    std::memcpy(&value, row.bytes + 4 * number, 4);
    return value;
  }

 private:
  int64_t block_;
  int floats_, bits_;
};

}  // namespace tfdml

#endif  // TFDML_BLOCKS_H_
