// The codec of `tfdml.compression.OneBit`: signs, and two means for each block.

#ifndef TFDML_ONE_BIT_H_
#define TFDML_ONE_BIT_H_

#include "blocks.h"

namespace tfdml {

class OneBit : public BlockCodec {
 public:
  explicit OneBit(int64_t block) : BlockCodec(block, 2, 1), codes_(block) {}

  void Encode(float* __restrict values, Row row, int64_t number, int64_t, Seed) {
    const int64_t size = block();
    // The largest of the positive numbers and of the others, by their bits, which are ordered.
    int32_t highest = 0, lowest = 0;
    for (int64_t i = 0; i < size; ++i) {
      const int32_t bits = FloatToBits(values[i]);
      highest = std::max(highest, bits);
      lowest = std::max(lowest, bits < 0 ? bits & 0x7FFFFFFF : 0);
    }
    const float one = WholeOne(size), high = BitsToFloat(highest), low = BitsToFloat(lowest);
    const float of_high = Inverse(high, one), of_low = Inverse(low, one);
    int32_t above = 0, all = 0, count = 0;
    for (int64_t i = 0; i < size; ++i) {
      const int32_t positive = FloatToBits(values[i]) > 0 ? -1 : 0;
      const float whole = std::nearbyint(values[i] * (positive ? of_high : of_low));
      all += static_cast<int32_t>(whole);
      above += static_cast<int32_t>(whole) & positive;
      count -= positive;
    }
    const bool finite = highest < kInfinity && lowest < kInfinity;
    const int32_t others = static_cast<int32_t>(size) - count;
    const float mean_above = finite ? Mean(above, count, high / one) : kNan;
    const float mean_below = finite ? Mean(all - above, others, low / one) : kNan;
    PutFloat(row, number, mean_above);
    PutFloat(row, row.blocks + number, mean_below);
    uint8_t* __restrict codes = codes_.data();
    for (int64_t i = 0; i < size; ++i) {
      const bool positive = FloatToBits(values[i]) > 0;
      codes[i] = positive;
      values[i] -= positive ? mean_above : mean_below;
    }
    Pack(codes, size, 1, Codes(row, number));
  }

  template <Into kInto>
  void Decode(Row row, int64_t number, float* to) const {
    const float high = Float(row, number), low = Float(row, row.blocks + number);
    const uint8_t* bytes = Codes(row, number);
    const int64_t apart = block() / 8;
    for (int shift = 0; shift < 8; ++shift, to += apart) {
      for (int64_t i = 0; i < apart; ++i) {
        Put<kInto>((bytes[i] >> shift) & 1 ? high : low, to + i);
      }
    }
  }

 private:
  static constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  // Of what is smaller, nothing is sent.
  static constexpr float kSmallest = 0x1p-106f;

  // Returns what brings the largest number to `one`.
  static float Inverse(float largest, float one) { return largest > kSmallest ? one / largest : 0; }

  // Returns the mean of numbers that have been summed as whole ones.
  static float Mean(int32_t sum, int32_t count, float unit) {
    return static_cast<float>(sum) / static_cast<float>(std::max(count, 1)) * unit;
  }

  std::vector<uint8_t> codes_;
};

}  // namespace tfdml

#endif  // TFDML_ONE_BIT_H_
