// Gradients as products of two thin matrices: what is computed before, between and after the
// exchanges of compression/codecs/power_sgd.py, each in one pass over the numbers.
//
// A gradient is a matrix of `rows x columns`, its last dimension the columns. `starts` and `lefts`
// are of `columns x rank` and `rows x rank`, `rights` of `rank x columns`.

#include "low_rank.h"
#include "tensors.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfdml {
namespace {

using ::tensorflow::shape_inference::DimensionHandle;
using ::tensorflow::shape_inference::InferenceContext;
using ::tensorflow::shape_inference::ShapeHandle;

// A gradient's rows and columns.
struct Matrix {
  explicit Matrix(const Tensor& tensor)
      : columns(tensor.dim_size(tensor.dims() - 1)), rows(tensor.NumElements() / columns) {}

  int64_t columns, rows;
};

// Returns an error if there are no matrices, or if a side of some thin ones is not theirs.
absl::Status CheckSides(const OpInputList& matrices, int64_t Matrix::*side, const OpInputList& thin,
                        int dimension) {
  for (int i = 0; i < matrices.size(); ++i) {
    if (matrices[i].dims() < 1 || matrices[i].NumElements() == 0) {
      return absl::InvalidArgumentError("Gradients must be matrices, and not empty.");
    }
    if (thin[i].dims() != 2 || thin[i].NumElements() == 0 ||
        thin[i].dim_size(dimension) != Matrix(matrices[i]).*side) {
      return absl::InvalidArgumentError("Thin matrices must have the gradients' sides.");
    }
  }
  return absl::OkStatus();
}

// Returns an error if a thin matrix is none, or empty.
absl::Status CheckThin(const OpInputList& matrices) {
  for (const Tensor& matrix : matrices) {
    if (matrix.dims() != 2 || matrix.NumElements() == 0) {
      return absl::InvalidArgumentError("Thin matrices must be matrices, and not empty.");
    }
  }
  return absl::OkStatus();
}

// Gradients and what has been left out before, and their products with `starts`.
class Left : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    OpInputList gradients, residuals, starts;
    OP_REQUIRES_OK(context, context->input_list("gradients", &gradients));
    OP_REQUIRES_OK(context, context->input_list("residuals", &residuals));
    OP_REQUIRES_OK(context, context->input_list("starts", &starts));
    OP_REQUIRES_OK(context, CheckAlike(gradients, residuals));
    OP_REQUIRES_OK(context, CheckSides(gradients, &Matrix::columns, starts, 0));
    const float scale = context->input(3 * gradients.size()).scalar<float>()();
    const float memory_scale = context->input(3 * gradients.size() + 1).scalar<float>()();
    std::vector<float*> values;
    OP_REQUIRES_OK(context, InPlace(context, "gradients", "values", &values));
    OpOutputList lefts;
    OP_REQUIRES_OK(context, context->output_list("lefts", &lefts));
    const std::vector<const float*> gradient = Sources(gradients), residual = Sources(residuals);
    for (int i = 0; i < gradients.size(); ++i) {
      const Matrix matrix(gradients[i]);
      const int64_t columns = matrix.columns, rank = starts[i].dim_size(1);
      Tensor* output = nullptr;
      OP_REQUIRES_OK(context, lefts.allocate(i, TensorShape({matrix.rows, rank}), &output));
      float* left = output->flat<float>().data();
      const std::vector<float> start =
          Transposed(starts[i].flat<float>().data(), columns, rank);
      InParallel(context, matrix.rows, columns, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
          const int64_t at = row * columns;
          Compensate(gradient[i] + at, residual[i] + at, scale, memory_scale, columns, values[i] + at);
          Dots(values[i] + at, start.data(), columns, rank, left + row * rank);
        }
      });
    }
  }
};

// The products of the transposed `lefts` with what `Left` has returned.
class Right : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    OpInputList values, lefts;
    OP_REQUIRES_OK(context, context->input_list("values", &values));
    OP_REQUIRES_OK(context, context->input_list("lefts", &lefts));
    OP_REQUIRES_OK(context, CheckSides(values, &Matrix::rows, lefts, 0));
    OpOutputList rights;
    OP_REQUIRES_OK(context, context->output_list("rights", &rights));
    for (int i = 0; i < values.size(); ++i) {
      const Matrix matrix(values[i]);
      const int64_t rank = lefts[i].dim_size(1);
      Tensor* output = nullptr;
      OP_REQUIRES_OK(context, rights.allocate(i, TensorShape({rank, matrix.columns}), &output));
      Sum(context, matrix, values[i].flat<float>().data(), lefts[i].flat<float>().data(), rank,
          output->flat<float>().data());
    }
  }

 private:
  // Sums parts of rows first, the same ones on whatever number of threads.
  static void Sum(OpKernelContext* context, const Matrix& matrix, const float* values,
                  const float* left, int64_t rank, float* right) {
    const int64_t parts = (matrix.rows + kRowsOfPart - 1) / kRowsOfPart;
    const int64_t size = rank * matrix.columns;
    std::vector<float> sums(parts * size);
    InParallel(context, parts, kRowsOfPart * matrix.columns, [&](int64_t first, int64_t last) {
      for (int64_t part = first; part < last; ++part) {
        const int64_t row = part * kRowsOfPart, rows = std::min(kRowsOfPart, matrix.rows - row);
        AddRows(values + row * matrix.columns, left + row * rank, rows, matrix.columns, rank,
                sums.data() + part * size);
      }
    });
    std::memcpy(right, sums.data(), 4 * size);
    for (int64_t part = 1; part < parts; ++part) {
      for (int64_t i = 0; i < size; ++i) right[i] += sums[part * size + i];
    }
  }
};

// The products of both, and what they leave out.
class Product : public OpKernel {
 public:
  explicit Product(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("size", &size_));
  }

  void Compute(OpKernelContext* context) override {
    OpInputList values, lefts, rights;
    OP_REQUIRES_OK(context, context->input_list("values", &values));
    OP_REQUIRES_OK(context, context->input_list("lefts", &lefts));
    OP_REQUIRES_OK(context, context->input_list("rights", &rights));
    OP_REQUIRES_OK(context, CheckSides(values, &Matrix::rows, lefts, 0));
    OP_REQUIRES_OK(context, CheckSides(values, &Matrix::columns, rights, 1));
    const float scale = context->input(3 * values.size()).scalar<float>()();
    std::vector<float*> sums, residuals;
    OP_REQUIRES_OK(context, Alike(context, values, "sums", &sums));
    OP_REQUIRES_OK(context, InPlace(context, "values", "residuals", &residuals));
    const std::vector<const float*> value = Sources(values), left = Sources(lefts);
    const std::vector<const float*> right = Sources(rights);
    for (int i = 0; i < values.size(); ++i) {
      const Matrix matrix(values[i]);
      const int64_t columns = matrix.columns, rank = lefts[i].dim_size(1);
      OP_REQUIRES(context, rights[i].dim_size(0) == rank,
                  absl::InvalidArgumentError("`lefts` and `rights` must have the same rank."));
      InParallel(context, matrix.rows, 2 * columns, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
          const int64_t at = row * columns;
          Combine(left[i] + row * rank, right[i], rank, columns, sums[i] + at);
          Divide(value[i] + at, scale, columns, sums[i] + at, residuals[i] + at);
        }
      });
    }
  }

 private:
  // Each process answers for its part of what the sum leaves out.
  void Divide(const float* values, float scale, int64_t count, float* sums,
              float* residuals) const {
    const float size = size_;
    TFDML_EACH_ALONE for (int64_t i = 0; i < count; ++i) {
      residuals[i] = values[i] - sums[i] / size;
      sums[i] *= scale;
    }
  }

  int size_;
};

// Orthonormal columns that span those of thin matrices.
class Orthogonal : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    OpInputList lefts;
    OP_REQUIRES_OK(context, context->input_list("lefts", &lefts));
    std::vector<float*> bases;
    OP_REQUIRES_OK(context, CheckThin(lefts));
    OP_REQUIRES_OK(context, Alike(context, lefts, "bases", &bases));
    for (int i = 0; i < lefts.size(); ++i) {
      const int64_t rows = lefts[i].dim_size(0), rank = lefts[i].dim_size(1);
      std::vector<float> columns = Transposed(lefts[i].flat<float>().data(), rows, rank);
      std::vector<float> found(rows * rank);
      Orthonormalize(rank, rows, columns.data(), found.data());
      Transpose(found.data(), rank, rows, bases[i]);
    }
  }
};

// The next step's `starts`: `rights` of length 1, or where they have vanished, the last ones. And
// whether the products of all processes are finite: their other factors are orthonormal.
class NextStarts : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    OpInputList rights, starts;
    OP_REQUIRES_OK(context, context->input_list("rights", &rights));
    OP_REQUIRES_OK(context, context->input_list("starts", &starts));
    OP_REQUIRES_OK(context, CheckThin(starts));
    const float scale = context->input(2 * rights.size()).scalar<float>()();
    std::vector<float*> next;
    OP_REQUIRES_OK(context, Alike(context, starts, "next", &next));
    Tensor* finite = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output("finite", TensorShape({}), &finite));
    bool all_finite = true;
    for (int i = 0; i < rights.size(); ++i) {
      const int64_t columns = starts[i].dim_size(0), rank = starts[i].dim_size(1);
      OP_REQUIRES(context, rights[i].shape() == TensorShape({rank, columns}),
                  absl::InvalidArgumentError("`rights` must be like `starts`, transposed."));
      const float* right = rights[i].flat<float>().data();
      std::vector<float> before = Transposed(starts[i].flat<float>().data(), columns, rank);
      for (int64_t k = 0; k < rank; ++k) {
        const float *begin = right + k * columns, *end = begin + columns;
        const float bound = static_cast<float>(rank);
        all_finite &= std::all_of(
            begin, end, [&](float number) { return std::isfinite(bound * number * scale); });
        if (std::all_of(begin, end, [](float number) { return number == 0.0f; })) continue;
        std::copy(begin, end, before.data() + k * columns);
        Normalize(columns, before.data() + k * columns);
      }
      Transpose(before.data(), rank, columns, next[i]);
    }
    finite->scalar<bool>()() = all_finite;
  }
};

// Sets that an output has the shapes of an input.
absl::Status Same(InferenceContext* context, const char* input, const char* output) {
  std::vector<ShapeHandle> shapes;
  TF_RETURN_IF_ERROR(context->input(input, &shapes));
  return context->set_output(output, shapes);
}

REGISTER_OP("TfdmlLeft")
    .Input("gradients: n * float")
    .Input("residuals: n * float")
    .Input("starts: n * float")
    .Input("scale: float")
    .Input("memory_scale: float")
    .Output("values: n * float")
    .Output("lefts: n * float")
    .Attr("n: int >= 1")
    .SetShapeFn([](InferenceContext* context) {
      std::vector<ShapeHandle> gradients, starts, lefts;
      TF_RETURN_IF_ERROR(context->input("gradients", &gradients));
      TF_RETURN_IF_ERROR(context->input("starts", &starts));
      for (size_t i = 0; i < gradients.size(); ++i) {
        ShapeHandle start, sides;
        DimensionHandle rows = context->MakeDim(1);
        TF_RETURN_IF_ERROR(context->WithRank(starts[i], 2, &start));
        TF_RETURN_IF_ERROR(context->WithRankAtLeast(gradients[i], 1, &sides));
        for (int side = 0; side < context->Rank(sides) - 1; ++side) {
          TF_RETURN_IF_ERROR(context->Multiply(rows, context->Dim(sides, side), &rows));
        }
        lefts.push_back(context->Matrix(rows, context->Dim(start, 1)));
      }
      TF_RETURN_IF_ERROR(context->set_output("lefts", lefts));
      return Same(context, "gradients", "values");
    });

REGISTER_OP("TfdmlRight")
    .Input("values: n * float")
    .Input("lefts: n * float")
    .Output("rights: n * float")
    .Attr("n: int >= 1")
    .SetShapeFn([](InferenceContext* context) {
      std::vector<ShapeHandle> values, lefts, rights;
      TF_RETURN_IF_ERROR(context->input("values", &values));
      TF_RETURN_IF_ERROR(context->input("lefts", &lefts));
      for (size_t i = 0; i < values.size(); ++i) {
        ShapeHandle left, sides;
        TF_RETURN_IF_ERROR(context->WithRank(lefts[i], 2, &left));
        TF_RETURN_IF_ERROR(context->WithRankAtLeast(values[i], 1, &sides));
        rights.push_back(context->Matrix(context->Dim(left, 1), context->Dim(sides, -1)));
      }
      return context->set_output("rights", rights);
    });

REGISTER_OP("TfdmlProduct")
    .Input("values: n * float")
    .Input("lefts: n * float")
    .Input("rights: n * float")
    .Input("scale: float")
    .Output("sums: n * float")
    .Output("residuals: n * float")
    .Attr("n: int >= 1")
    .Attr("size: int >= 1")
    .SetShapeFn([](InferenceContext* context) {
      TF_RETURN_IF_ERROR(Same(context, "values", "sums"));
      return Same(context, "values", "residuals");
    });

REGISTER_OP("TfdmlOrthogonal")
    .Input("lefts: n * float")
    .Output("bases: n * float")
    .Attr("n: int >= 1")
    .SetShapeFn([](InferenceContext* context) { return Same(context, "lefts", "bases"); });

REGISTER_OP("TfdmlNextStarts")
    .Input("rights: n * float")
    .Input("starts: n * float")
    .Input("scale: float")
    .Output("next: n * float")
    .Output("finite: bool")
    .Attr("n: int >= 1")
    .SetShapeFn([](InferenceContext* context) {
      TF_RETURN_IF_ERROR(context->set_output("finite", {context->Scalar()}));
      return Same(context, "starts", "next");
    });

REGISTER_KERNEL_BUILDER(Name("TfdmlLeft").Device(tensorflow::DEVICE_CPU), Left);
REGISTER_KERNEL_BUILDER(Name("TfdmlRight").Device(tensorflow::DEVICE_CPU), Right);
REGISTER_KERNEL_BUILDER(Name("TfdmlProduct").Device(tensorflow::DEVICE_CPU), Product);
REGISTER_KERNEL_BUILDER(Name("TfdmlOrthogonal").Device(tensorflow::DEVICE_CPU), Orthogonal);
REGISTER_KERNEL_BUILDER(Name("TfdmlNextStarts").Device(tensorflow::DEVICE_CPU), NextStarts);

}  // namespace
}  // namespace tfdml
