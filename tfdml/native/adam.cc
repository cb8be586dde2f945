// Adam's update of a variable, in one pass over its numbers.
//
// Computed from TensorFlow's operations it is a dozen passes, most of which write fresh memory. The
// results have the same bits: each operation here is one of those, rounded alone.

#include <cmath>
#include <cstring>
#include <vector>

#include "tensors.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"

namespace tfdml {
namespace {

using ::tensorflow::Var;

// A variable's numbers, to be changed in place.
//
// Whoever has read the variable may share its memory, and must not see the change.
absl::Status Own(OpKernelContext* context, Var* variable, float** numbers) {
  Tensor* tensor = variable->tensor();
  if (!tensor->IsInitialized() || tensor->dtype() != tensorflow::DT_FLOAT) {
    return absl::FailedPreconditionError("A variable must be of float32, and have a value.");
  }
  if (!tensor->RefCountIsOne()) {
    Tensor copy;
    TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_FLOAT, tensor->shape(), &copy));
    std::memcpy(OnLargePages(&copy), tensor->flat<float>().data(), tensor->TotalBytes());
    *tensor = copy;
  }
  *numbers = tensor->flat<float>().data();
  return absl::OkStatus();
}

class Adam : public OpKernel {
 public:
  explicit Adam(OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("first_rate", &first_rate_));
    OP_REQUIRES_OK(construction, construction->GetAttr("second_rate", &second_rate_));
    OP_REQUIRES_OK(construction, construction->GetAttr("epsilon", &epsilon_));
  }

  void Compute(OpKernelContext* context) override {
    tensorflow::core::RefCountPtr<Var> weight, first, second;
    OP_REQUIRES_OK(context, LookupResource(context, HandleFromInput(context, 0), &weight));
    OP_REQUIRES_OK(context, LookupResource(context, HandleFromInput(context, 1), &first));
    OP_REQUIRES_OK(context, LookupResource(context, HandleFromInput(context, 2), &second));
    const Tensor& gradient = context->input(3);
    const Tensor& rate = context->input(4);
    tensorflow::mutex_lock of_weight(*weight->mu()), of_first(*first->mu()),
        of_second(*second->mu());
    for (Var* variable : {weight.get(), first.get(), second.get()}) {
      OP_REQUIRES(context, variable->tensor()->shape() == gradient.shape(),
                  absl::InvalidArgumentError("A gradient must have its variables' shape."));
    }
    OP_REQUIRES(context, rate.NumElements() == 1,
                absl::InvalidArgumentError("`rate` must be a number."));
    float *w, *m, *v;
    OP_REQUIRES_OK(context, Own(context, weight.get(), &w));
    OP_REQUIRES_OK(context, Own(context, first.get(), &m));
    OP_REQUIRES_OK(context, Own(context, second.get(), &v));
    const float* g = gradient.flat<float>().data();
    const float alpha = rate.flat<float>()(0);
    const float one = first_rate_, two = second_rate_, epsilon = epsilon_;
    InParallel(context, gradient.NumElements(), 8, [=](int64_t begin, int64_t end) {
      TFDML_EACH_ALONE for (int64_t i = begin; i < end; ++i) {
        m[i] += (g[i] - m[i]) * one;
        v[i] += (g[i] * g[i] - v[i]) * two;
        w[i] -= (m[i] * alpha) / (std::sqrt(v[i]) + epsilon);
      }
    });
  }

 private:
  float first_rate_, second_rate_, epsilon_;
};

REGISTER_OP("TfdmlAdam")
    .Input("weight: resource")
    .Input("first_moment: resource")
    .Input("second_moment: resource")
    .Input("gradient: float")
    .Input("rate: float")
    .Attr("first_rate: float")
    .Attr("second_rate: float")
    .Attr("epsilon: float")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

REGISTER_KERNEL_BUILDER(Name("TfdmlAdam").Device(tensorflow::DEVICE_CPU), Adam);

}  // namespace
}  // namespace tfdml
