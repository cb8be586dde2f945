// The largest numbers of rows: exactly those, in one pass over the numbers; and rows of such numbers.

#include <atomic>
#include <cstring>

#include "blocks.h"
#include "tensors.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/util/work_sharder.h"

namespace tfdml {
namespace {

using ::tensorflow::shape_inference::InferenceContext;

// Numbers that are looked at, to guess a threshold, some of them side by side; and how many standard
// deviations it is lowered.
constexpr int64_t kSample = 16384, kInARow = 4;
constexpr double kDeviations = 4.0;
// So many numbers are looked at side by side, to be looked at one by one if one of them passes.
constexpr int64_t kGroup = 16;
// Sizes that are counted together.
constexpr int32_t kRange = 1 << 16;
// Numbers that a thread takes at once, and what a number costs it in cycles.
constexpr int64_t kPart = 1 << 15, kCyclesOfPart = kPart;
// Numbers that could be written in a row in the time of one that is written anywhere.
constexpr int64_t kNumbersOfMiss = 16;

struct Found {
  float value;
  int32_t place;
};

// Returns a number's size, by its bits. What is not finite counts as infinite.
int32_t SizeOf(float value) { return std::min(FloatToBits(value) & 0x7FFFFFFF, kInfinity); }

// Returns the size of the smallest of the `count` largest: first by its highest bits, then exactly.
int32_t Limit(const std::vector<int32_t>& sizes, int64_t count) {
  std::vector<int32_t> with_bits(kInfinity / kRange + 1);
  for (int32_t size : sizes) ++with_bits[size / kRange];
  int32_t range = kInfinity / kRange;
  for (; with_bits[range] < count; --range) count -= with_bits[range];
  std::vector<int32_t> within;
  for (int32_t size : sizes) {
    if (size / kRange == range) within.push_back(size);
  }
  auto limit = within.begin() + count - 1;
  std::nth_element(within.begin(), limit, within.end(), std::greater<int32_t>());
  return *limit;
}

// Returns a size that at least `count` numbers of a row have, most likely, and not many more.
int32_t LikelyThreshold(const float* row, int64_t length, int64_t count) {
  // Odd: rows of a matrix have even lengths.
  const int64_t stride = std::max(kInARow, length / kSample * kInARow) | 1;
  std::vector<int32_t> sample;
  for (int64_t i = 0; i < length; i += stride) {
    const int64_t end = std::min(length, i + kInARow);
    for (int64_t j = i; j < end; ++j) sample.push_back(SizeOf(row[j]));
  }
  const double part = static_cast<double>(count) * sample.size() / length;
  const double among = std::ceil(part + kDeviations * std::sqrt(part));
  return Limit(sample, std::min<int64_t>(sample.size(), among));
}

// Appends what of some numbers reaches the threshold, in order.
void Pass(const float* numbers, int64_t first, int64_t last, int32_t threshold,
          std::vector<Found>* found) {
  Found group[kGroup + 1];
  for (int64_t start = first; start < last; start += kGroup) {
    const int64_t count = std::min(kGroup, last - start);
    if (count == kGroup && LargestBits(numbers + start, kGroup) < threshold) continue;
    int number = 0;
    for (int64_t i = start; i < start + count; ++i) {
      group[number] = {numbers[i], static_cast<int32_t>(i)};
      number += SizeOf(numbers[i]) >= threshold;
    }
    found->insert(found->end(), group, group + number);
  }
}

class Largest : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor& rows = context->input(0);
    const int64_t count = context->input(1).scalar<int32_t>()(), number = rows.dim_size(0);
    const int64_t length = rows.dim_size(1);
    OP_REQUIRES(context, count >= 1 && count <= length,
                absl::InvalidArgumentError("`count` must be from 1 to the numbers of a row."));
    Tensor *values = nullptr, *places = nullptr;
    const TensorShape shape({number, count});
    OP_REQUIRES_OK(context, context->allocate_output(0, shape, &values));
    OP_REQUIRES_OK(context, context->allocate_output(1, shape, &places));
    for (int64_t i = 0; i < number; ++i) {
      const float* row = rows.flat<float>().data() + i * length;
      Choose(context, row, length, count, values->flat<float>().data() + i * count,
             places->flat<int32_t>().data() + i * count);
    }
  }

 private:
  static void Choose(OpKernelContext* context, const float* row, int64_t length, int64_t count,
                     float* values, int32_t* places) {
    std::vector<Found> found = Reaching(context, row, length, LikelyThreshold(row, length, count));
    // Where the sample has misled.
    if (static_cast<int64_t>(found.size()) < count) found = Reaching(context, row, length, 0);
    std::vector<int32_t> sizes;
    for (const Found& each : found) sizes.push_back(SizeOf(each.value));
    const int32_t limit = Limit(sizes, count);
    int64_t chosen = 0;
    auto choose = [&](const Found& each) {
      values[chosen] = each.value;
      places[chosen++] = each.place;
    };
    for (const Found& each : found) {
      if (SizeOf(each.value) > limit) choose(each);
    }
    for (const Found& each : found) {
      if (SizeOf(each.value) == limit && chosen < count) choose(each);
    }
  }

  // Returns all that reach a threshold, in order.
  static std::vector<Found> Reaching(OpKernelContext* context, const float* row, int64_t length,
                                     int32_t threshold) {
    const int64_t parts = (length + kPart - 1) / kPart;
    std::vector<std::vector<Found>> of_parts(parts);
    const auto* threads = context->device()->tensorflow_cpu_worker_threads();
    tensorflow::Shard(threads->num_threads, threads->workers, parts, kCyclesOfPart,
                      [&](int64_t first, int64_t last) {
                        for (int64_t part = first; part < last; ++part) {
                          Pass(row, part * kPart, std::min(length, (part + 1) * kPart), threshold,
                               &of_parts[part]);
                        }
                      });
    std::vector<Found> found;
    for (const auto& each : of_parts) found.insert(found.end(), each.begin(), each.end());
    return found;
  }
};

REGISTER_OP("TfdmlLargest")
    .Input("rows: float")
    .Input("count: int32")
    .Output("values: float")
    .Output("places: int32")
    .SetShapeFn([](InferenceContext* context) {
      tensorflow::shape_inference::DimensionHandle count;
      TF_RETURN_IF_ERROR(context->MakeDimForScalarInput(1, &count));
      const auto shape = context->MakeShape({context->Dim(context->input(0), 0), count});
      context->set_output(0, shape);
      context->set_output(1, shape);
      return absl::OkStatus();
    });
REGISTER_KERNEL_BUILDER(Name("TfdmlLargest").Device(tensorflow::DEVICE_CPU), Largest);

// Adds numbers at their places to rows of zeros, or to one row.
class Spread : public OpKernel {
 public:
  explicit Spread(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("sum", &sum_));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor& payload = context->input(0);
    const int64_t number = payload.dim_size(0), bytes = payload.dim_size(1);
    const int64_t length = context->input(1).scalar<int32_t>()();
    OP_REQUIRES(context, bytes % 8 == 0,
                absl::InvalidArgumentError("A row of `payload` must have 8 bytes a number."));
    Tensor* rows = nullptr;
    const TensorShape shape = sum_ ? TensorShape({length}) : TensorShape({number, length});
    OP_REQUIRES_OK(context, context->allocate_output(0, shape, &rows));
    float* to = OnLargePages(rows);
    InParallel(context, shape.num_elements(), 1, [&](int64_t first, int64_t last) {
      std::memset(to + first, 0, (last - first) * sizeof(float));
    });
    std::atomic<bool> fits{true};
    for (int64_t i = 0; i < number; ++i) {
      const uint8_t* row = payload.flat<uint8_t>().data() + i * bytes;
      // Rows are added one after the other, so that sums have the same bits however many threads run.
      if (!Add(context, row, bytes / 8, length, sum_ ? to : to + i * length)) fits = false;
    }
    OP_REQUIRES(context, fits, absl::InvalidArgumentError("A place is outside of its row."));
  }

 private:
  // Adds a row's numbers, which have different places. Returns whether all places are in the row.
  static bool Add(OpKernelContext* context, const uint8_t* row, int64_t count, int64_t length,
                  float* to) {
    std::atomic<bool> fits{true};
    InParallel(context, count, kNumbersOfMiss, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        // A payload begins at any byte.
        float value;
        int32_t place;
        std::memcpy(&value, row + 4 * i, sizeof(value));
        std::memcpy(&place, row + 4 * (count + i), sizeof(place));
        if (place < 0 || place >= length) {
          fits = false;
        } else {
          to[place] += value;
        }
      }
    });
    return fits;
  }

  bool sum_;
};

REGISTER_OP("TfdmlSpread")
    .Input("payload: uint8")
    .Input("length: int32")
    .Attr("sum: bool")
    .Output("rows: float")
    .SetShapeFn([](InferenceContext* context) {
      bool sum;
      TF_RETURN_IF_ERROR(context->GetAttr("sum", &sum));
      tensorflow::shape_inference::DimensionHandle length;
      TF_RETURN_IF_ERROR(context->MakeDimForScalarInput(1, &length));
      const auto number = context->Dim(context->input(0), 0);
      context->set_output(
          0, sum ? context->MakeShape({length}) : context->MakeShape({number, length}));
      return absl::OkStatus();
    });
REGISTER_KERNEL_BUILDER(Name("TfdmlSpread").Device(tensorflow::DEVICE_CPU), Spread);

}  // namespace
}  // namespace tfdml
