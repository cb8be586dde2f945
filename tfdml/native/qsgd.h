// The codec of `tfdml.compression.QSGD`: whole numbers of a few bits, and a scale for each block.

#ifndef TFDML_QSGD_H_
#define TFDML_QSGD_H_

#include "blocks.h"

namespace tfdml {

class Qsgd : public BlockCodec {
 public:
  Qsgd(int bits, int64_t block, bool l2, bool stochastic)
      : BlockCodec(block, 1, bits),
        l2_(l2),
        stochastic_(stochastic),
        levels_(static_cast<float>((1 << (bits - 1)) - 1)),
        part_(1.0f / levels_),
        codes_(block) {}

  void Encode(float* __restrict values, Row row, int64_t number, int64_t first, Seed seed) {
    const float step = Step(values);
    PutFloat(row, number, step);
    uint8_t* codes = bits() == 8 ? Codes(row, number) : codes_.data();
    if (stochastic_) {
      Round<true>(values, step, first, Prepared(seed), codes);
    } else {
      Round<false>(values, step, first, seed, codes);
    }
    if (bits() < 8) Pack(codes, block(), bits(), Codes(row, number));
  }

  template <Into kInto>
  void Decode(Row row, int64_t number, float* to) const {
    const float step = Float(row, number);
    const uint8_t* bytes = Codes(row, number);
    const int64_t apart = block() * bits() / 8;
    const uint8_t mask = static_cast<uint8_t>((1 << bits()) - 1);
    for (int shift = 0; shift < 8; shift += bits(), to += apart) {
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

  float Step(const float* values) const {
    float largest = LargestOrNan(values, block());
    if (l2_) {
      const float norm = std::sqrt(SumOfSquares(values, block(), largest));
      largest *= std::min(norm, kLargest / std::max(largest, 1.0f));
    }
    return largest * part_;
  }

  template <bool kStochastic>
  void Round(float* __restrict values, float step, int64_t first, Seed seed,
             uint8_t* __restrict codes) const {
    const float levels = levels_, inverse = step > kSmallest ? 1.0f / step : 0.0f;
    const int64_t count = block();
    for (int64_t i = 0; i < count; ++i) {
      float code = values[i] * inverse;
      code = code > levels ? levels : code;
      code = code < -levels ? -levels : code;
      if (kStochastic) {
        code = std::floor(code + Noise(static_cast<uint32_t>(first + i), seed.first, seed.second));
      } else {
        code = std::nearbyint(code);
      }
      code += levels;
      codes[i] = static_cast<uint8_t>(static_cast<int32_t>(code));
      values[i] = std::fma(levels - code, step, values[i]);
    }
  }

  bool l2_, stochastic_;
  float levels_, part_;
  std::vector<uint8_t> codes_;
};

// The codec of `tfdml.compression.TernGrad`: what is far out is cut off first.
class TernGrad : public Qsgd {
 public:
  TernGrad(int64_t block, float clip) : Qsgd(2, block, false, true), clip_(clip) {}

  void Encode(float* __restrict values, Row row, int64_t number, int64_t first, Seed seed) {
    const float largest = LargestOrNan(values, block());
    const float squares = SumOfSquares(values, block(), largest);
    const float bound = clip_ * std::sqrt(squares / static_cast<float>(block())) * largest;
    const int64_t count = block();
    for (int64_t i = 0; i < count; ++i) {
      const float value = values[i];
      // Not finite, it stays so.
      values[i] = (std::fabs(value) > bound ? std::copysign(bound, value) : value) + 0.0f * value;
    }
    Qsgd::Encode(values, row, number, first, seed);
  }

 private:
  float clip_;
};

}  // namespace tfdml

#endif  // TFDML_QSGD_H_
