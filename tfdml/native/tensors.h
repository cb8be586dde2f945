// Lists of tensors that operations are given and return, and what all begin with.

#ifndef TFDML_TENSORS_H_
#define TFDML_TENSORS_H_

#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/util/work_sharder.h"

namespace tfdml {

using ::tensorflow::OpInputList;
using ::tensorflow::OpKernel;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::OpOutputList;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;

// Says of a loop that what it writes is what it has read at the same place, if anything.
#ifdef __clang__
#define TFDML_EACH_ALONE _Pragma("clang loop vectorize(assume_safety)")
#else
#define TFDML_EACH_ALONE _Pragma("GCC ivdep")
#endif

// Bytes of which it is worth to ask for large pages.
constexpr uintptr_t kLarge = uintptr_t{4} << 20;

// What a number costs a thread, in cycles.
constexpr int64_t kCyclesOfNumber = 2;

// Calls `work(first, last)` for parts of a range on the threads of the device.
template <typename Work>
void InParallel(OpKernelContext* context, int64_t count, int64_t numbers_each, Work work) {
  const auto* threads = context->device()->tensorflow_cpu_worker_threads();
  tensorflow::Shard(threads->num_threads, threads->workers, count, numbers_each * kCyclesOfNumber,
                    work);
}

// Where tensors' numbers are.
template <typename List>
std::vector<const float*> Sources(const List& list) {
  std::vector<const float*> sources;
  for (int i = 0; i < list.size(); ++i) sources.push_back(list[i].template flat<float>().data());
  return sources;
}

// Asks for large pages where memory is fresh: with small ones, the system's work for each page would
// take longer than the codecs.
template <typename T = float>
T* OnLargePages(Tensor* tensor) {
  T* data = tensor->flat<T>().data();
#ifdef MADV_HUGEPAGE
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data) / page * page;
  const uintptr_t end = reinterpret_cast<uintptr_t>(data) + tensor->TotalBytes();
  if (end - begin >= kLarge) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
  return data;
}

// Allocates outputs of the shapes of some inputs.
inline absl::Status Alike(OpKernelContext* context, const OpInputList& inputs, const char* name,
                          std::vector<float*>* to) {
  OpOutputList outputs;
  TF_RETURN_IF_ERROR(context->output_list(name, &outputs));
  for (int i = 0; i < inputs.size(); ++i) {
    Tensor* output = nullptr;
    TF_RETURN_IF_ERROR(outputs.allocate(i, inputs[i].shape(), &output));
    to->push_back(OnLargePages(output));
  }
  return absl::OkStatus();
}

// Gives outputs of the shapes of some inputs the memory of those, where nobody else needs them:
// fresh memory is dear, because the system zeros it.
inline absl::Status InPlace(OpKernelContext* context, const char* input, const char* name,
                            std::vector<float*>* to) {
  int from, from_end, out, out_end;
  TF_RETURN_IF_ERROR(context->op_kernel().InputRange(input, &from, &from_end));
  TF_RETURN_IF_ERROR(context->op_kernel().OutputRange(name, &out, &out_end));
  for (int i = 0; i < out_end - out; ++i) {
    Tensor* output = nullptr;
    TF_RETURN_IF_ERROR(context->forward_input_or_allocate_output(
        {from + i}, out + i, context->input(from + i).shape(), &output));
    to->push_back(OnLargePages(output));
  }
  return absl::OkStatus();
}

// Returns an error if residuals are there and are not of the gradients' sizes.
inline absl::Status CheckAlike(const OpInputList& gradients, const OpInputList& residuals) {
  bool alike = residuals.size() == 0 || residuals.size() == gradients.size();
  for (int i = 0; alike && i < residuals.size(); ++i) {
    alike = residuals[i].NumElements() == gradients[i].NumElements();
  }
  return alike ? absl::OkStatus()
               : absl::InvalidArgumentError("`residuals` must be like `gradients`, or none.");
}

// Takes the loss scale out of some numbers of a gradient, and adds what earlier steps have left out;
// in place, or elsewhere.
inline void Compensate(const float* gradient, const float* residual, float scale, float memory_scale,
                       int64_t count, float* values) {
  if (residual == nullptr) {
    TFDML_EACH_ALONE for (int64_t i = 0; i < count; ++i) values[i] = gradient[i] / scale;
  } else if (scale == 1.0f) {
    TFDML_EACH_ALONE for (int64_t i = 0; i < count; ++i) {
      values[i] = std::fma(residual[i], memory_scale, gradient[i]);
    }
  } else {
    TFDML_EACH_ALONE for (int64_t i = 0; i < count; ++i) {
      values[i] = std::fma(residual[i], memory_scale, gradient[i] / scale);
    }
  }
}

}  // namespace tfdml

#endif  // TFDML_TENSORS_H_
