// The codec of `tfdml.compression.OneBit`: signs, and sizes of a tile's rows and columns.

#ifndef TFDML_ONE_BIT_H_
#define TFDML_ONE_BIT_H_

#include "blocks.h"

namespace tfdml {

// A block is a tile. Of a row of bytes, the sizes of all tiles' rows come first, then those of their
// columns, a byte each, then the signs.
class OneBit : public BlockCodec {
 public:
  OneBit(int64_t block, int64_t columns)
      : BlockCodec(block, 0, 1),
        columns_(columns),
        rows_(block / columns),
        codes_(block),
        largest_(rows_),
        sums_(columns),
        sizes_(columns) {}

  int64_t RowBytes(int64_t tiles) const {
    return tiles * (4 * rows_ + columns_) + BlockCodec::RowBytes(tiles);
  }

  void Encode(float* __restrict values, Row row, int64_t number, int64_t, Seed) {
    FindLargest(values);
    SumColumns(values);
    uint8_t* sizes = row.bytes + Columns(row, number);
    int64_t squares = 0;
    for (int64_t i = 0; i < columns_; ++i) {
      const auto size = static_cast<int32_t>(sizes_[i]);
      sizes[i] = static_cast<uint8_t>(size);
      squares += size * size;
    }
    for (int64_t r = 0; r < rows_; ++r) {
      const float size = SizeOfRow(values + r * columns_, largest_[r], squares);
      PutFloat(row, number * rows_ + r, size);
      TakeAway(size, sizes_.data(), columns_, values + r * columns_, codes_.data() + r * columns_);
    }
    Pack(codes_.data(), block(), 1, row.bytes + Signs(row, number));
  }

  template <Into kInto>
  void Decode(Row row, int64_t number, float* to) {
    const uint8_t* sizes = row.bytes + Columns(row, number);
    const uint8_t* bytes = row.bytes + Signs(row, number);
    const int64_t apart = block() / 8;
    for (int64_t r = 0; r < rows_; ++r, to += columns_) {
      // A tile has 8 rows or a multiple of it, so each row's signs are one bit of some bytes.
      const int shift = static_cast<int>(r * columns_ / apart);
      PutRow<kInto>(Float(row, number * rows_ + r), sizes, bytes + r * columns_ % apart, shift,
                    columns_, to);
    }
  }

 private:
  // What stands for 1 of a row's numbers; with a column's size, int32 holds their products.
  static constexpr float kOne = 0x1p22f;
  // Of what is smaller, nothing is sent.
  static constexpr float kSmallest = 0x1p-100f;

  int64_t Columns(Row row, int64_t number) const {
    return 4 * rows_ * row.blocks + number * columns_;
  }

  int64_t Signs(Row row, int64_t number) const {
    return (4 * rows_ + columns_) * row.blocks + number * block() / 8;
  }

  // Returns what brings the largest number to `one`; 0 for what is too small, or not finite.
  static float Inverse(float largest, float one) { return largest > kSmallest ? one / largest : 0; }

  // Notes the largest size of each row.
  void FindLargest(const float* values) {
    for (int64_t r = 0; r < rows_; ++r) {
      largest_[r] = LargestOrNan(values + r * columns_, columns_);
    }
  }

  // Makes the columns' sizes: whole numbers from 1 to 255.
  void SumColumns(const float* __restrict values) {
    int32_t most = 0;
    for (float each : largest_) most = std::max(most, FloatToBits(each));
    const float inverse = Inverse(BitsToFloat(most), WholeOne(rows_));
    std::fill(sums_.begin(), sums_.end(), 0);
    for (int64_t r = 0; r < rows_; ++r) {
      AddSizes(values + r * columns_, inverse, columns_, sums_.data());
    }
    float highest = 1;
    for (int64_t i = 0; i < columns_; ++i) highest = std::max(highest, static_cast<float>(sums_[i]));
    const float scale = 255.0f / highest;
    for (int64_t i = 0; i < columns_; ++i) {
      sizes_[i] = std::max(std::nearbyint(static_cast<float>(sums_[i]) * scale), 1.0f);
    }
  }

  // Returns the size of a row for which the sum of the squares of what is left out is the least.
  float SizeOfRow(const float* values, float largest, int64_t squares) const {
    const float inverse = Inverse(largest, kOne);
    const int64_t products = Products(values, inverse, sizes_.data(), columns_);
    const float ratio = static_cast<float>(products) / static_cast<float>(squares);
    return ratio * (largest * (1.0f / kOne));
  }

  // What follows are the loops over a row's numbers, on their own so that many go at once.

  static void AddSizes(const float* __restrict values, float inverse, int64_t count,
                       int32_t* __restrict sums) {
    for (int64_t i = 0; i < count; ++i) {
      sums[i] += static_cast<int32_t>(std::nearbyint(std::abs(values[i]) * inverse));
    }
  }

  static int64_t Products(const float* __restrict values, float inverse,
                          const float* __restrict sizes, int64_t count) {
    int64_t products = 0;
    for (int64_t i = 0; i < count; ++i) {
      const auto whole = static_cast<int32_t>(std::nearbyint(std::abs(values[i]) * inverse));
      products += whole * static_cast<int32_t>(sizes[i]);
    }
    return products;
  }

  static void TakeAway(float size, const float* __restrict sizes, int64_t count,
                       float* __restrict values, uint8_t* __restrict codes) {
    for (int64_t i = 0; i < count; ++i) {
      const bool positive = FloatToBits(values[i]) > 0;
      const float sent = size * sizes[i];
      codes[i] = positive;
      values[i] -= positive ? sent : -sent;
    }
  }

  template <Into kInto>
  static void PutRow(float size, const uint8_t* __restrict sizes, const uint8_t* __restrict signs,
                     int shift, int64_t count, float* __restrict to) {
    for (int64_t i = 0; i < count; ++i) {
      const float sent = size * static_cast<float>(sizes[i]);
      Put<kInto>((signs[i] >> shift) & 1 ? sent : -sent, to + i);
    }
  }

  int64_t columns_, rows_;
  std::vector<uint8_t> codes_;
  std::vector<float> largest_, sizes_;
  std::vector<int32_t> sums_;
};

}  // namespace tfdml

#endif  // TFDML_ONE_BIT_H_
