// The codec of `tfdml.compression.NaturalCompression`: signs and powers of two.

#ifndef TFDML_NATURAL_H_
#define TFDML_NATURAL_H_

#include "blocks.h"

namespace tfdml {

class Natural : public BlockCodec {
 public:
  explicit Natural(int64_t block) : BlockCodec(block, 1, 8) {}

  void Encode(float* __restrict values, Row row, int64_t number, int64_t first, Seed seed) {
    const float largest = LargestOrNan(values, block());
    PutFloat(row, number, largest);
    uint8_t* __restrict codes = Codes(row, number);
    const Seed keys = Prepared(seed);
    const int64_t count = block();
    for (int64_t i = 0; i < count; ++i) {
      const float part = largest == 0.0f ? 0.0f : std::fabs(values[i]) / largest;
      // The exponent, and what is above the power of two, are bits of the number.
      const int32_t bits = FloatToBits(part);
      const float rest = static_cast<float>(bits & 0x7FFFFF) * 0x1p-23f;
      const float noise = Noise(static_cast<uint32_t>(first + i), keys.first, keys.second);
      int32_t halvings = 127 - (bits >> 23) - (noise < rest ? 1 : 0);
      halvings = std::max(std::min(halvings, kHalvings), 0);
      halvings = part > 0.0f ? halvings : kHalvings + 1;
      codes[i] = static_cast<uint8_t>(values[i] < 0.0f ? halvings + 128 : halvings);
    }
  }

  template <Into kInto>
  void Decode(Row row, int64_t number, float* to) const {
    const float largest = Float(row, number);
    const uint8_t* codes = Codes(row, number);
    const int64_t count = block();
    for (int64_t i = 0; i < count; ++i) {
      const int32_t halvings = codes[i] & 127;
      const float size = halvings > kHalvings ? 0.0f : BitsToFloat((127 - halvings) << 23);
      PutProduct<kInto>(codes[i] >= 128 ? -size : size, largest, to + i);
    }
  }

 private:
  // Halvings of a block's largest number that there are codes for; the last code is 0.
  static constexpr int32_t kHalvings = 126;
};

}  // namespace tfdml

#endif  // TFDML_NATURAL_H_
