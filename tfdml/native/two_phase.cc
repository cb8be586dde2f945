// What is computed before, between and after the exchanges of a sum in two phases, each in one pass
// over the numbers: see compression/exchange/two_phase.py, whose stages these are. What they are given is
// declared in two_phase_operations.cc.

#include <atomic>
#include <variant>

#include "halves.h"
#include "natural.h"
#include "one_bit.h"
#include "qsgd.h"
#include "tensors.h"

namespace tfdml {
namespace {

using Codec = std::variant<std::monostate, Float16, BFloat16, Qsgd, Natural, TernGrad, OneBit>;

// What all three operations have in common: a codec, and rows of bytes.
class Stage : public OpKernel {
 public:
  explicit Stage(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("codec", &codec_));
    OP_REQUIRES_OK(context, context->GetAttr("bits", &bits_));
    OP_REQUIRES_OK(context, context->GetAttr("l2", &l2_));
    OP_REQUIRES_OK(context, context->GetAttr("stochastic", &stochastic_));
    OP_REQUIRES_OK(context, context->GetAttr("block", &block_));
    OP_REQUIRES_OK(context, context->GetAttr("chunk", &chunk_));
    OP_REQUIRES_OK(context, context->GetAttr("row_bytes", &row_bytes_));
    OP_REQUIRES_OK(context, context->GetAttr("clip", &clip_));
    OP_REQUIRES_OK(context, context->GetAttr("columns", &columns_));
    OP_REQUIRES(context, block_ > 0 && block_ % 8 == 0 && chunk_ % block_ == 0,
                absl::InvalidArgumentError("`block` must be a multiple of 8, `chunk` of `block`."));
    OP_REQUIRES(context, bits_ == 8 || bits_ == 4 || bits_ == 2,
                absl::InvalidArgumentError("`bits` must be 8, 4 or 2."));
    OP_REQUIRES(context, codec_ != "onebit" || (columns_ > 0 && block_ % (8 * columns_) == 0),
                absl::InvalidArgumentError("`block` must be 8 rows of `columns`, or a multiple."));
    int64_t least = -1;
    WithCodec([&](auto& codec) { least = std::max<int64_t>(8, codec.RowBytes(blocks_of_row())); });
    OP_REQUIRES(context, least >= 0,
                absl::InvalidArgumentError("`codec` must be the name of one."));
    OP_REQUIRES(context, row_bytes_ >= least,
                absl::InvalidArgumentError("`row_bytes` must be those of a chunk."));
  }

 protected:
  int64_t block() const { return block_; }
  int64_t row_bytes() const { return row_bytes_; }
  int64_t blocks_of_row() const { return chunk_ / block_; }

  Row RowOf(const Tensor& rows, int64_t row) const {
    auto* bytes = const_cast<uint8_t*>(rows.flat<uint8_t>().data());
    return {bytes + row * row_bytes_, blocks_of_row()};
  }

  // Returns an error if some rows of bytes are not of this codec, or do not hold some numbers.
  absl::Status Check(const Tensor& rows, int64_t numbers) const {
    if (rows.dims() != 2 || rows.dim_size(1) != row_bytes_) {
      return absl::InvalidArgumentError("Rows must have `row_bytes` bytes.");
    }
    if (rows.dim_size(0) * chunk_ < numbers) {
      return absl::InvalidArgumentError("Rows must hold all numbers.");
    }
    return absl::OkStatus();
  }

  // Calls `work(codec, first block, last block)` on the threads of the device.
  template <typename Work>
  void InParallel(OpKernelContext* context, int64_t blocks, Work work) const {
    tfdml::InParallel(context, blocks, block_, [&](int64_t first, int64_t last) {
      WithCodec([&](auto& codec) { work(codec, first, last); });
    });
  }

 private:
  Codec Made() const {
    if (codec_ == "float16") return Float16(block_);
    if (codec_ == "bfloat16") return BFloat16(block_);
    if (codec_ == "qsgd") return Qsgd(bits_, block_, l2_, stochastic_);
    if (codec_ == "natural") return Natural(block_);
    if (codec_ == "terngrad") return TernGrad(block_, clip_);
    if (codec_ == "onebit") return OneBit(block_, columns_);
    return std::monostate();
  }

  template <typename Use>
  void WithCodec(Use use) const {
    Codec codec = Made();
    std::visit(
        [&](auto& chosen) {
          if constexpr (std::is_base_of_v<BlockCodec, std::decay_t<decltype(chosen)>>) use(chosen);
        },
        codec);
  }

  std::string codec_;
  int bits_;
  bool l2_, stochastic_;
  float clip_;
  int64_t block_, chunk_, columns_, row_bytes_;
};

Seed SeedOf(const Tensor& tensor) {
  auto seed = tensor.flat<int32_t>();
  return {static_cast<uint32_t>(seed(0)), static_cast<uint32_t>(seed(1))};
}

class Encode : public Stage {
 public:
  explicit Encode(OpKernelConstruction* context) : Stage(context) {
    OP_REQUIRES_OK(context, context->GetAttr("rows", &rows_));
  }

  void Compute(OpKernelContext* context) override {
    OpInputList gradients, residuals;
    OP_REQUIRES_OK(context, context->input_list("gradients", &gradients));
    OP_REQUIRES_OK(context, context->input_list("residuals", &residuals));
    const float scale = context->input(gradients.size() + residuals.size()).scalar<float>()();
    const float memory_scale = context->input(gradients.size() + residuals.size() + 1).scalar<float>()();
    const Seed seed = SeedOf(context->input(gradients.size() + residuals.size() + 2));
    Tensor* payload = nullptr;
    OP_REQUIRES_OK(context,
                   context->allocate_output("payload", TensorShape({rows_, row_bytes()}), &payload));
    OnLargePages<uint8_t>(payload);
    OP_REQUIRES_OK(context, CheckAlike(gradients, residuals));
    const std::vector<const float*> gradient = Sources(gradients), residual = Sources(residuals);
    std::vector<float*> left;
    OP_REQUIRES_OK(context, InPlace(context, "gradients", "left", &left));
    std::vector<int64_t> sizes;
    for (int i = 0; i < gradients.size(); ++i) sizes.push_back(gradients[i].NumElements());
    const Bucket bucket(sizes);
    OP_REQUIRES_OK(context, Check(*payload, bucket.size()));
    for (int64_t row = 0; row < rows_; ++row) Finish(RowOf(*payload, row));
    InParallel(context, rows_ * blocks_of_row(), [&](auto& codec, int64_t first, int64_t last) {
      std::vector<float> buffer(block());
      for (int64_t number = first; number < last; ++number) {
        const Row row = RowOf(*payload, number / blocks_of_row());
        const int64_t place = number % blocks_of_row(), start = number * block();
        float* values = bucket.Whole(left, start, block(), buffer.data());
        if (start + block() > bucket.size()) std::fill_n(values, block(), 0.0f);
        bucket.Parts(start, block(), [&](size_t i, int64_t from, int64_t to, int64_t count) {
          Compensate(gradient[i] + from, residual.empty() ? nullptr : residual[i] + from, scale,
                     memory_scale, count, values + to);
        });
        codec.Encode(values, row, place, start, seed);
        if (left.empty() || values != buffer.data()) continue;
        bucket.Parts(start, block(), [&](size_t i, int64_t from, int64_t to, int64_t count) {
          std::memcpy(left[i] + from, values + to, 4 * count);
        });
      }
    });
  }

 private:
  // Zeros what a row is padded with.
  void Finish(Row row) const { std::memset(row.bytes + row_bytes() - 8, 0, 8); }

  int64_t rows_;
};

class Add : public Stage {
 public:
  using Stage::Stage;

  void Compute(OpKernelContext* context) override {
    const Tensor& received = context->input(0);
    OpInputList residuals;
    OP_REQUIRES_OK(context, context->input_list("residuals", &residuals));
    const float memory_scale = context->input(1 + residuals.size()).scalar<float>()();
    const Seed seed = SeedOf(context->input(2 + residuals.size()));
    Tensor* encoded = nullptr;
    OP_REQUIRES_OK(context,
                   context->allocate_output("encoded", TensorShape({1, row_bytes()}), &encoded));
    OnLargePages<uint8_t>(encoded);
    std::vector<float*> left;
    OP_REQUIRES_OK(context, Alike(context, residuals, "left", &left));
    const std::vector<const float*> residual = Sources(residuals);
    OP_REQUIRES_OK(context, Check(received, 0));
    for (const Tensor& each : residuals) {
      OP_REQUIRES(context, each.NumElements() == blocks_of_row() * block(),
                  absl::InvalidArgumentError("`residuals` must have the numbers of a chunk."));
    }
    const Row to = RowOf(*encoded, 0);
    std::memset(to.bytes + row_bytes() - 8, 0, 8);
    InParallel(context, blocks_of_row(), [&](auto& codec, int64_t first, int64_t last) {
      std::vector<float> total(block());
      for (int64_t number = first; number < last; ++number) {
        const int64_t start = number * block();
        std::fill(total.begin(), total.end(), 0.0f);
        for (int64_t row = 0; row < received.dim_size(0); ++row) {
          codec.template Decode<Into::kAdd>(RowOf(received, row), number, total.data());
        }
        for (const float* each : residual) {
          for (int64_t i = 0; i < block(); ++i) total[i] = std::fma(each[start + i], memory_scale, total[i]);
        }
        codec.Encode(total.data(), to, number, start, seed);
        if (!left.empty()) std::memcpy(left[0] + start, total.data(), 4 * block());
      }
    });
  }
};

class Decode : public Stage {
 public:
  explicit Decode(OpKernelConstruction* context) : Stage(context) {
    OP_REQUIRES_OK(context, context->GetAttr("shapes", &shapes_));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor& gathered = context->input(0);
    const float scale = context->input(1).scalar<float>()();
    OpOutputList outputs;
    OP_REQUIRES_OK(context, context->output_list("sums", &outputs));
    std::vector<int64_t> sizes;
    std::vector<float*> sums;
    for (size_t i = 0; i < shapes_.size(); ++i) {
      Tensor* output = nullptr;
      OP_REQUIRES_OK(context, outputs.allocate(i, shapes_[i], &output));
      sizes.push_back(output->NumElements());
      sums.push_back(OnLargePages(output));
    }
    Tensor* finite = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output("finite", TensorShape({}), &finite));
    const Bucket bucket(sizes);
    OP_REQUIRES_OK(context, Check(gathered, bucket.size()));
    std::atomic<bool> all_finite{true};
    const int64_t blocks = (bucket.size() + block() - 1) / block();
    InParallel(context, blocks, [&](auto& codec, int64_t first, int64_t last) {
      std::vector<float> buffer(block());
      int32_t largest = 0;
      for (int64_t number = first; number < last; ++number) {
        const Row row = RowOf(gathered, number / blocks_of_row());
        const int64_t start = number * block();
        float* values = bucket.Whole(sums, start, block(), buffer.data());
        codec.template Decode<Into::kSet>(row, number % blocks_of_row(), values);
        for (int64_t i = 0; i < block(); ++i) values[i] *= scale;
        bucket.Parts(start, block(), [&](size_t i, int64_t from, int64_t to, int64_t count) {
          largest = std::max(largest, LargestBits(values + to, count));
          if (values == buffer.data()) std::memcpy(sums[i] + from, values + to, 4 * count);
        });
      }
      if (largest >= kInfinity) all_finite = false;
    });
    finite->scalar<bool>()() = all_finite;
  }

 private:
  std::vector<TensorShape> shapes_;
};

REGISTER_KERNEL_BUILDER(Name("TfdmlEncode").Device(tensorflow::DEVICE_CPU), Encode);
REGISTER_KERNEL_BUILDER(Name("TfdmlAdd").Device(tensorflow::DEVICE_CPU), Add);
REGISTER_KERNEL_BUILDER(Name("TfdmlDecode").Device(tensorflow::DEVICE_CPU), Decode);

}  // namespace
}  // namespace tfdml
