// Products of a matrix with thin ones, by rows that are read once.

#ifndef TFDML_LOW_RANK_H_
#define TFDML_LOW_RANK_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace tfdml {

// Columns of a thin matrix that are worked on together, and rows whose products are summed apart.
constexpr int64_t kTogether = 4, kRowsOfPart = 256;
// Numbers that a processor multiplies at once.
constexpr int kLanes = 8;
typedef float Lanes __attribute__((vector_size(4 * kLanes)));

// Calls `use(first, how many)` for groups of thin columns, with how many as a constant.
template <typename Use>
void InGroups(int64_t rank, Use use) {
  int64_t first = 0;
  for (; first + kTogether <= rank; first += kTogether) {
    use(first, std::integral_constant<int, kTogether>());
  }
  for (; first + 2 <= rank; first += 2) use(first, std::integral_constant<int, 2>());
  for (; first < rank; ++first) use(first, std::integral_constant<int, 1>());
}

inline void Transpose(const float* matrix, int64_t rows, int64_t columns, float* turned) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) turned[j * rows + i] = matrix[i * columns + j];
  }
}

inline std::vector<float> Transposed(const float* matrix, int64_t rows, int64_t columns) {
  std::vector<float> turned(rows * columns);
  Transpose(matrix, rows, columns, turned.data());
  return turned;
}

// Sets `dots[i]` to the product of some numbers with row `i` of `starts`.
inline void Dots(const float* __restrict numbers, const float* starts, int64_t count, int64_t rank,
                 float* __restrict dots) {
  InGroups(rank, [&](int64_t first, auto together) {
    Lanes sums[together] = {};
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      Lanes number, start;
      std::memcpy(&number, numbers + i, sizeof number);
      for (int k = 0; k < together; ++k) {
        std::memcpy(&start, starts + (first + k) * count + i, sizeof start);
        sums[k] += number * start;
      }
    }
    for (int k = 0; k < together; ++k) {
      float sum = 0.0f;
      for (int lane = 0; lane < kLanes; ++lane) sum += sums[k][lane];
      for (int64_t j = i; j < count; ++j) sum += numbers[j] * starts[(first + k) * count + j];
      dots[first + k] = sum;
    }
  });
}

// Adds the products of some rows' transposed `left` with the rows to `right`, tile by tile.
inline void AddRows(const float* values, const float* left, int64_t rows, int64_t columns,
                    int64_t rank, float* right) {
  constexpr int64_t kTile = 512;
  for (int64_t tile = 0; tile < columns; tile += kTile) {
    const int64_t count = std::min(kTile, columns - tile);
    InGroups(rows, [&](int64_t row, auto together) {
      const float* __restrict from = values + row * columns + tile;
      for (int64_t k = 0; k < rank; ++k) {
        float* __restrict to = right + k * columns + tile;
        for (int64_t j = 0; j < count; ++j) {
          float sum = to[j];
          for (int i = 0; i < together; ++i) {
            sum = std::fma(left[(row + i) * rank + k], from[i * columns + j], sum);
          }
          to[j] = sum;
        }
      }
    });
  }
}

// Sets `product` to that of a row of a left matrix and a right matrix: the same numbers, to the bit,
// as XLA makes of `power_sgd.product`, whose first addition it does by fma with the first product.
inline void Combine(const float* left, const float* right, int64_t rank, int64_t columns,
                    float* __restrict product) {
  if (rank == 1) {
    for (int64_t j = 0; j < columns; ++j) product[j] = left[0] * right[j];
    return;
  }
  for (int64_t j = 0; j < columns; ++j) {
    product[j] = std::fma(left[0], right[j], left[1] * right[columns + j]);
  }
  InGroups(rank - 2, [&](int64_t first, auto together) {
    const float* of_row = left + 2 + first;
    const float* __restrict rows = right + (2 + first) * columns;
    for (int64_t j = 0; j < columns; ++j) {
      float sum = product[j];
      for (int k = 0; k < together; ++k) sum = std::fma(of_row[k], rows[k * columns + j], sum);
      product[j] = sum;
    }
  });
}

// The length of a vector.
inline float Length(const float* numbers, int64_t count) {
  float squares;
  Dots(numbers, numbers, count, 1, &squares);
  return std::sqrt(squares);
}

// Divides a vector by its length, zeros excepted; by its largest number first, because tiny squares
// would vanish.
inline void Normalize(int64_t count, float* __restrict numbers) {
  float largest = 0.0f;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::abs(numbers[i]));
  if (largest == 0.0f) return;  // A NaN among zeros stays.
  for (int64_t i = 0; i < count; ++i) numbers[i] /= largest;
  const float length = Length(numbers, count);
  for (int64_t i = 0; i < count; ++i) numbers[i] /= length;
}

// Sets `found` to orthonormal rows that span those of `rank` vectors: Gram-Schmidt, each vector
// orthogonalized twice. What is left of a vector that the others already span is rounding error, and
// becomes zeros. `vectors` are used up.
inline void Orthonormalize(int64_t rank, int64_t count, float* vectors, float* found) {
  constexpr float kRedundant = 1e-4f;
  std::vector<float> parts(rank);
  for (int64_t i = 0; i < rank; ++i) {
    float* __restrict rest = vectors + i * count;
    Normalize(count, rest);
    for (int turn = 0; turn < 2; ++turn) {
      Dots(rest, found, count, i, parts.data());
      for (int64_t k = 0; k < i; ++k) {
        const float* __restrict other = found + k * count;
        for (int64_t j = 0; j < count; ++j) rest[j] = std::fma(-parts[k], other[j], rest[j]);
      }
    }
    const float length = Length(rest, count);
    float* __restrict own = found + i * count;
    for (int64_t j = 0; j < count; ++j) own[j] = length < kRedundant ? 0.0f : rest[j] / length;
  }
}

}  // namespace tfdml

#endif  // TFDML_LOW_RANK_H_
