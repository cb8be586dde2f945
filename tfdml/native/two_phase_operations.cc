// What the operations of two_phase.cc are given, and the shapes of what they return.

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfdml {
namespace {

using ::tensorflow::shape_inference::InferenceContext;
using ::tensorflow::shape_inference::ShapeHandle;

absl::Status BytesShape(InferenceContext* context, int64_t rows) {
  int64_t row_bytes;
  TF_RETURN_IF_ERROR(context->GetAttr("row_bytes", &row_bytes));
  context->set_output(0, context->Matrix(rows, row_bytes));
  return absl::OkStatus();
}

// The second output is of the shapes of the inputs called residuals.
absl::Status LeftShape(InferenceContext* context) {
  std::vector<ShapeHandle> residuals;
  TF_RETURN_IF_ERROR(context->input("residuals", &residuals));
  return context->set_output("left", residuals);
}

}  // namespace

#define TFDML_CODEC                                                                               \
  Attr("codec: string").Attr("bits: int = 8").Attr("l2: bool = false")                            \
      .Attr("stochastic: bool = false").Attr("clip: float = 0").Attr("block: int")                \
      .Attr("columns: int = 0").Attr("chunk: int").Attr("row_bytes: int")

REGISTER_OP("TfdmlEncode")
    .Input("gradients: n * float")
    .Input("residuals: m * float")
    .Input("scale: float")
    .Input("memory_scale: float")
    .Input("seed: int32")
    .Output("payload: uint8")
    .Output("left: m * float")
    .Attr("n: int >= 1")
    .Attr("m: int >= 0")
    .Attr("rows: int")
    .TFDML_CODEC
    .SetShapeFn([](InferenceContext* context) {
      int64_t rows;
      TF_RETURN_IF_ERROR(context->GetAttr("rows", &rows));
      TF_RETURN_IF_ERROR(BytesShape(context, rows));
      return LeftShape(context);
    });

REGISTER_OP("TfdmlAdd")
    .Input("received: uint8")
    .Input("residuals: m * float")
    .Input("memory_scale: float")
    .Input("seed: int32")
    .Output("encoded: uint8")
    .Output("left: m * float")
    .Attr("m: int >= 0")
    .TFDML_CODEC
    .SetShapeFn([](InferenceContext* context) {
      TF_RETURN_IF_ERROR(BytesShape(context, 1));
      return LeftShape(context);
    });

REGISTER_OP("TfdmlDecode")
    .Input("gathered: uint8")
    .Input("scale: float")
    .Output("sums: n * float")
    .Output("finite: bool")
    .Attr("n: int >= 1")
    .Attr("shapes: list(shape)")
    .TFDML_CODEC
    .SetShapeFn([](InferenceContext* context) {
      std::vector<tensorflow::PartialTensorShape> shapes;
      TF_RETURN_IF_ERROR(context->GetAttr("shapes", &shapes));
      for (size_t i = 0; i < shapes.size(); ++i) {
        ShapeHandle shape;
        TF_RETURN_IF_ERROR(context->MakeShapeFromPartialTensorShape(shapes[i], &shape));
        context->set_output(i, shape);
      }
      context->set_output(shapes.size(), context->Scalar());
      return absl::OkStatus();
    });

}  // namespace tfdml
