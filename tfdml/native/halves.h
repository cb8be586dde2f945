// The codecs of `tfdml.compression.Float16` and `BFloat16`: two bytes for each number.

#ifndef TFDML_HALVES_H_
#define TFDML_HALVES_H_

#include "blocks.h"

#ifdef __F16C__
#include <immintrin.h>
#endif

namespace tfdml {

class Float16 : public BlockCodec {
 public:
  explicit Float16(int64_t block) : BlockCodec(block, 1, 16) {}

  void Encode(float* __restrict values, Row row, int64_t number, int64_t, Seed) {
    const int32_t bits = LargestBits(values, block());
    // The power of two that brings the largest number to from 2**13 to 2**14.
    const int32_t power = std::min(std::max(kTop - (bits >> 23), -kMost), kMost);
    const float scale = bits < kInfinity ? BitsToFloat((power + 127) << 23)
                                         : std::numeric_limits<float>::quiet_NaN();
    PutFloat(row, number, scale);
    const int64_t count = block();
    for (int64_t i = 0; i < count; ++i) values[i] *= scale;
    ToHalves(values, count, Codes(row, number));
  }

  template <Into kInto>
  void Decode(Row row, int64_t number, float* to) const {
    // Powers of two have exact inverses.
    const float inverse = 1.0f / Float(row, number);
    const uint8_t* halves = Codes(row, number);
    float numbers[kTogether];
    for (int64_t i = 0; i < block(); i += kTogether) {
      FromHalves(halves + 2 * i, numbers);
      for (int64_t j = 0; j < kTogether; ++j) PutProduct<kInto>(numbers[j], inverse, to + i + j);
    }
  }

 private:
  static constexpr int32_t kTop = 127 + 13, kMost = 120;
  static constexpr int64_t kTogether = 8;

#ifdef __F16C__
  static void ToHalves(const float* values, int64_t count, uint8_t* to) {
    for (int64_t i = 0; i < count; i += 8) {
      const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(values + i), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * i), halves);
    }
  }

  static void FromHalves(const uint8_t* halves, float* to) {
    const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(halves));
    _mm256_storeu_ps(to, _mm256_cvtph_ps(packed));
  }
#else
  static void ToHalves(const float* values, int64_t count, uint8_t* to) {
    for (int64_t i = 0; i < count; ++i) {
      const __fp16 half = static_cast<__fp16>(values[i]);
      std::memcpy(to + 2 * i, &half, 2);
    }
  }

  static void FromHalves(const uint8_t* halves, float* to) {
    for (int64_t i = 0; i < kTogether; ++i) {
      __fp16 half;
      std::memcpy(&half, halves + 2 * i, 2);
      to[i] = static_cast<float>(half);
    }
  }
#endif
};

class BFloat16 : public BlockCodec {
 public:
  explicit BFloat16(int64_t block) : BlockCodec(block, 0, 16) {}

  void Encode(float* __restrict values, Row row, int64_t number, int64_t, Seed) {
    uint8_t* codes = Codes(row, number);
    const int64_t count = block();
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bits = static_cast<uint32_t>(FloatToBits(values[i]));
      // To the nearest, of two the even one; of NaN, one that stays NaN.
      const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
      const uint16_t half = (bits & 0x7FFFFFFF) > kInfinity ? (bits >> 16 | 64) : rounded;
      std::memcpy(codes + 2 * i, &half, 2);
      values[i] -= BitsToFloat(static_cast<int32_t>(static_cast<uint32_t>(half) << 16));
    }
  }

  template <Into kInto>
  void Decode(Row row, int64_t number, float* to) const {
    const uint8_t* codes = Codes(row, number);
    const int64_t count = block();
    for (int64_t i = 0; i < count; ++i) {
      uint16_t half;
      std::memcpy(&half, codes + 2 * i, 2);
      Put<kInto>(BitsToFloat(static_cast<int32_t>(static_cast<uint32_t>(half) << 16)), to + i);
    }
  }
};

}  // namespace tfdml

#endif  // TFDML_HALVES_H_
