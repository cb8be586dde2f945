// The codec of `tfdml.compression.QSGD`: whole numbers of a few bits, and a scale for each block.

#ifndef TFDML_QSGD_H_
#define TFDML_QSGD_H_

#include "blocks.h"

namespace tfdml {

class Qsgd {
 public:
  Qsgd(int bits, int64_t block, bool l2, bool stochastic)
      : block_(block),
        bits_(bits),
        l2_(l2),
        stochastic_(stochastic),
        levels_(static_cast<float>((1 << (bits - 1)) - 1)),
        part_(1.0f / levels_),
        codes_(block) {}

  // Encodes a block and leaves in `values` what that leaves out; `first` is the place of its first
  // number, for random numbers.
  void Encode(float* __restrict values, Row row, int64_t number, int64_t first, Seed seed) {
    const float step = Step(values);
    const float inverse = step > kSmallest ? 1.0f / step : 0.0f;
    std::memcpy(row.bytes + 4 * number, &step, 4);
    uint8_t* codes = bits_ == 8 ? Codes(row, number) : codes_.data();
    if (stochastic_) {
      Round<true>(values, step, inverse, first, seed, codes);
    } else {
      Round<false>(values, step, inverse, first, seed, codes);
    }
    if (bits_ < 8) Pack(codes, block_, bits_, Codes(row, number));
  }

  // Puts the numbers of a block into `to`.
  template <Into kInto>
  void Decode(Row row, int64_t number, float* to) const {
    float step;
    std::memcpy(&step, row.bytes + 4 * number, 4);
    const uint8_t* bytes = Codes(row, number);
    const int64_t apart = block_ * bits_ / 8;
    const uint8_t mask = static_cast<uint8_t>((1 << bits_) - 1);
    for (int shift = 0; shift < 8; shift += bits_, to += apart) {
      for (int64_t i = 0; i < apart; ++i) {
        const int32_t code = (bytes[i] >> shift) & mask;
        PutProduct<kInto>(static_cast<float>(code) - levels_, step, to + i);
      }
    }
  }

 private:
  // Of float32; and what has an inverse.
  static constexpr float kLargest = 3.4e38f;
  static constexpr float kSmallest = 3e-39f;

  uint8_t* Codes(Row row, int64_t number) const {
    return row.bytes + 4 * row.blocks + number * block_ * bits_ / 8;
  }

  float Step(const float* values) const {
    float largest = LargestOrNan(values, block_);
    if (l2_) {
      // Of numbers from -1 to 1, whose squares neither vanish nor overflow.
      const float one = WholeOne(block_);
      int32_t sum = 0;
      for (int64_t i = 0; i < block_; ++i) {
        const float unit = largest == 0.0f ? 0.0f : values[i] / largest;
        sum += static_cast<int32_t>(std::nearbyint(unit * unit * one));
      }
      const float norm = std::sqrt(static_cast<float>(sum) / one);
      largest *= std::min(norm, kLargest / std::max(largest, 1.0f));
    }
    return largest * part_;
  }

  template <bool kStochastic>
  void Round(float* __restrict values, float step, float inverse, int64_t first, Seed seed,
             uint8_t* __restrict codes) const {
    const uint32_t one = Mixed(seed.first + 0x9E3779B9u), two = Mixed(seed.second + 0x9E3779B9u);
    const float levels = levels_;
    for (int64_t i = 0; i < block_; ++i) {
      float code = values[i] * inverse;
      code = code > levels ? levels : code;
      code = code < -levels ? -levels : code;
      if (kStochastic) {
        const uint32_t hashed = Mixed(Mixed(static_cast<uint32_t>(first + i) + one) + two);
        code = std::floor(code + (BitsToFloat(static_cast<int32_t>(hashed >> 9) | kOne) - 1.0f));
      } else {
        code = std::nearbyint(code);
      }
      code += levels;
      codes[i] = static_cast<uint8_t>(static_cast<int32_t>(code));
      values[i] = std::fma(levels - code, step, values[i]);
    }
  }

  int64_t block_;
  int bits_;
  bool l2_, stochastic_;
  float levels_, part_;
  std::vector<uint8_t> codes_;
};

}  // namespace tfdml

#endif  // TFDML_QSGD_H_
