"""Patches to Horovod's source before it is compiled, with their reasons."""

import hashlib
import json
from pathlib import Path

# Lines of gloo's alltoallv and allgatherv.
_RANKS = """  for (int i = 1; i < worldSize; i++) {
    int sendRank = (myRank + i) % worldSize;
    int recvRank = (myRank + worldSize - i) % worldSize;
"""
_SEND_TO = """    in->send(
        sendRank, slot, inOffsetPerRank[sendRank], inLengthPerRank[sendRank]);
"""
_RECEIVE_FROM = """    out->recv(
        recvRank, slot, outOffsetPerRank[recvRank], outLengthPerRank[recvRank]);
"""
_COPY = """  memcpy(
      static_cast<char*>(out->ptr) + myOutOffset,
      static_cast<char*>(in->ptr) + myInOffset,
      myChunkSize);
"""
_SEND = "    out->send(sendRank, slot, byteOffsets[sendIndex], byteCounts[sendIndex]);\n"
_RECEIVE = "    out->recv(recvRank, slot, byteOffsets[recvIndex], byteCounts[recvIndex]);\n"
_FIRST = "    if (i == 0) {\n"
_LATER = """      continue;
    }

    // Wait for previous operations to complete before kicking off new ones.
    out->waitSend(opts.timeout);
    out->waitRecv(opts.timeout);
"""
# Last CMake line for Horovod's TensorFlow library.
_LIBRARY_NAME = 'set_target_properties(${TF_TARGET_LIB} PROPERTIES OUTPUT_NAME "mpi_lib")\n'
# Variable of a build with the library's run path.
RPATH_VARIABLE = "TFDML_HOROVOD_RPATH"
# Access to a GPU's stream: by a function that TensorFlow no longer has, ...
_STREAM = """GpuStreamHandle AsGpuStreamValue(Stream* stream);
} // namespace stream_executor
} // namespace gpu
#if TENSORFLOW_VERSION >= 2011000000
#include "tensorflow/compiler/xla/stream_executor/stream.h"
#else
#include "tensorflow/stream_executor/stream.h"
#endif // TENSORFLOW_VERSION >= 2011000000
"""
# ... and by the method that replaced it.
_STREAM_NOW = """} // namespace gpu
} // namespace stream_executor
#include "tensorflow/compiler/xla/stream_executor/stream.h"
namespace stream_executor {
namespace gpu {
inline GpuStreamHandle AsGpuStreamValue(Stream* stream) {
  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);
}
} // namespace gpu
} // namespace stream_executor
"""
# Lines of Horovod's queue, and of the loop that empties it.
_QUEUED = "  message_queue_.push(std::move(message));\n"
_ALL_QUEUED = "    message_queue_.push(std::move(messages[i]));\n  }\n"
_ANNOUNCE = "  arrived_.notify_one();\n"
_LAST_METHOD = "  void RemoveJoinTensor();\n"
_CYCLE = "  state.last_cycle_start = std::chrono::steady_clock::now();\n\n"
_PAUSE = "  if (sleep_duration > std::chrono::steady_clock::duration::zero()) {\n"
_RESPONSES = "            : ResponseList();\n\n    if (process_set_id == 0) {\n"
# Lines of gloo's handler of events.
_TRY_LOCK = "  std::unique_lock<std::mutex> lock(m_, std::try_to_lock);\n  if (!lock) {\n"
# Bodies of functions that call gloo's all-reduce, and what they call instead.
_ALLREDUCE = """  gloo::AllreduceOptions opts(gloo_context_->ctx);
  opts.setOutput<T>(static_cast<T*>(buffer_data), (size_t) num_elements);

  if (reduce_op == ReduceOp::SUM) {
    void (*func)(void*, const void*, const void*, size_t) = &::gloo::sum<T>;
    opts.setReduceFunction(gloo::AllreduceOptions::Func(func));
   } else if (reduce_op == ReduceOp::MIN) {
    void (*func)(void*, const void*, const void*, size_t) = &::gloo::min<T>;
    opts.setReduceFunction(gloo::AllreduceOptions::Func(func));
   } else if (reduce_op == ReduceOp::MAX) {
    void (*func)(void*, const void*, const void*, size_t) = &::gloo::max<T>;
    opts.setReduceFunction(gloo::AllreduceOptions::Func(func));
   } else if (reduce_op == ReduceOp::PRODUCT) {
    void (*func)(void*, const void*, const void*, size_t) = &::gloo::product<T>;
    opts.setReduceFunction(gloo::AllreduceOptions::Func(func));
   }

  gloo::allreduce(opts);
"""
_DIRECT_ALLREDUCE = """  void (*func)(void*, const void*, const void*, size_t) = &::gloo::sum<T>;
  if (reduce_op == ReduceOp::MIN) {
    func = &::gloo::min<T>;
  } else if (reduce_op == ReduceOp::MAX) {
    func = &::gloo::max<T>;
  } else if (reduce_op == ReduceOp::PRODUCT) {
    func = &::gloo::product<T>;
  }
  gloo_context_->direct_exchange->AllReduce(buffer_data, num_elements, sizeof(T), func);
"""
_BITS = """                                        int count) {{
  gloo::AllreduceOptions opts(gloo_context_.ctx);
  opts.setOutput(bitvector.data(), count);
  void (*func)(void*, const void*, const void*, size_t) = &Bit{}<long long>;
  opts.setReduceFunction(gloo::AllreduceOptions::Func(func));
  gloo::allreduce(opts);
"""
_DIRECT_BITS = """                                        int count) {{
  gloo_context_.direct_exchange->AllReduce(bitvector.data(), count, sizeof(long long),
                                           &Bit{}<long long>);
"""
# Beginnings of functions that call gloo's all-gather and all-to-all, or prepare the latter.
_COUNTS = "  std::vector<size_t> counts(recvcounts, recvcounts + gloo_context_->ctx->size);\n\n"
_ALLGATHER = f"{_COUNTS}  gloo::AllgathervOptions opts(gloo_context_->ctx);\n"
_DIRECT_ALLGATHER = """  std::vector<size_t> bytes;
  for (size_t count : counts) {
    bytes.push_back(count * sizeof(T));
  }
  if (buffer_data == buffer_out && gloo_context_->direct_exchange->AllGather(buffer_out, bytes)) {
    return;
  }

"""
_ALLTOALL = "  gloo::AlltoallvOptions opts(gloo_context_->ctx);\n"
_DIRECT_ALLTOALL = """  if (gloo_context_->direct_exchange->ReceiveRows(buffer_out)) {
    return;
  }
"""
_PREPARE = (
    "  Status status = PrepareOutputAndParams(e, sdispls, rdispls, sendcounts, recvcounts);\n"
)
_OFFER = """  size_t row_bytes = DataType_Size(e.tensor->dtype());
  for (int i = 1; i < e.tensor->shape().dims(); ++i) {
    row_bytes *= e.tensor->shape().dim_size(i);
  }
  gloo_context.direct_exchange->OfferRows(e.tensor->data(), row_bytes);
"""
_SPLITS = "                                           std::vector<int32_t>& recvsplits) {\n"
_DIRECT_SPLITS = """  if (gloo_context_.direct_exchange->SendRows(splits, recvsplits)) {
    return;
  }
"""
# Lines next to which they are listed, made and released.
_GLOO_SOURCES = (
    '    list(APPEND SOURCES "${PROJECT_SOURCE_DIR}/horovod/common/gloo/gloo_context.cc"\n'
)
_DIRECT_SOURCES = "".join(
    f'                        "${{PROJECT_SOURCE_DIR}}/horovod/common/gloo/direct_{name}.cc"\n'
    for name in ("allreduce", "exchange")
)
_CONTEXTS = "  std::shared_ptr<gloo::Context> local_ctx = nullptr;\n"
_CROSS_CONTEXT = "  // 3) process-set-limited cross context\n"
_FINALIZE = "void GlooContext::Finalize() {\n"

# Files of this directory that are added to Horovod's source, by their path there.
ADDED = {
    f"horovod/common/gloo/{name}": name
    for name in ("direct_allreduce.cc", "direct_exchange.cc", "direct_exchange.h", "direct_inbox.h")
}

# By file: pairs of a text that occurs exactly once in it, and its replacement.
CHANGES: dict[str, tuple[tuple[str, str], ...]] = {
    # The one file that does not compile since TensorFlow ships its XLA headers incomplete. It only
    # adds the all-reduce within XLA-compiled functions, which Horovod itself leaves off by default.
    "horovod/tensorflow/CMakeLists.txt": (
        ('list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n', ""),
        # Run path to the NCCL of a wheel: the folder of links that the library was linked against
        # is gone when it is loaded.
        (
            _LIBRARY_NAME,
            f"{_LIBRARY_NAME}if(DEFINED ENV{{{RPATH_VARIABLE}}})\n"
            "    set_target_properties(${TF_TARGET_LIB} PROPERTIES BUILD_WITH_INSTALL_RPATH TRUE\n"
            f'        INSTALL_RPATH "$ENV{{{RPATH_VARIABLE}}}")\nendif()\n',
        ),
    ),
    # Without this a library for GPUs is built, but cannot be loaded.
    "horovod/tensorflow/mpi_ops.cc": ((_STREAM, _STREAM_NOW),),
    # TensorFlow's flags go to a shell: a path with a space, as a checkout or a home directory may
    # have, must be quoted. CMake leaves only items that begin with a dash unchanged.
    "cmake/Modules/FindTensorflow.cmake": (
        ("import tensorflow as tf; print(tf.__v", "import shlex, tensorflow as tf; print(tf.__v"),
        (
            "print(' '.join(tf.sysconfig.get_link_flags()))",
            "print('-L' + shlex.quote(tf.sysconfig.get_lib()), *tf.sysconfig.get_link_flags()[1:])",
        ),
        (
            "print(' '.join(tf.sysconfig.get_compile_flags()))",
            "print(shlex.join(tf.sysconfig.get_compile_flags()))",
        ),
        (
            """    string(REPLACE " " ";" Tensorflow_LIBRARIES_LIST "${Tensorflow_LIBRARIES}")
    list(GET Tensorflow_LIBRARIES_LIST 0 Tensorflow_LIB_PATH_ARGUMENT)
    string(REGEX REPLACE "^-L" "" Tensorflow_LIB_PATH ${Tensorflow_LIB_PATH_ARGUMENT})
""",
            "    get_filename_component("
            'Tensorflow_LIB_PATH "${Tensorflow_INCLUDE_DIRS}" DIRECTORY)\n',
        ),
        (
            "${Tensorflow_LIB_PATH}/python/_pywrap_tensorflow_internal.so",
            r"\"${Tensorflow_LIB_PATH}/python/_pywrap_tensorflow_internal.so\"",
        ),
        (
            "${Tensorflow_LIBRARIES} ${lib_tensorflow_cc_so_path}",
            r"${Tensorflow_LIBRARIES} \"${lib_tensorflow_cc_so_path}\"",
        ),
    ),
    # When a rank is lost, those that notice close their connections, which is how ranks that wait
    # for them learn of it. Contexts of process sets are never `enabled_`: their connections would
    # stay open, and with four or more ranks some would wait for gloo's whole timeout.
    "horovod/common/gloo/gloo_context.cc": (
        (
            f"{_FINALIZE}  if (!enabled_) {{\n    return;\n  }}\n",
            # Its buffers would keep the connections open.
            f"{_FINALIZE}  direct_exchange.reset();\n",
        ),
        ('#include "http_store.h"\n', '#include "direct_exchange.h"\n#include "http_store.h"\n'),
        (
            _CROSS_CONTEXT,
            "  direct_exchange = std::make_shared<DirectExchange>(ctx, local_ctx);\n\n"
            f"{_CROSS_CONTEXT}",
        ),
    ),
    # Exchanges of tfdml's, see direct_exchange.h. The all-reduce also carries the bits by which
    # ranks negotiate before each exchange.
    "CMakeLists.txt": ((_GLOO_SOURCES, _GLOO_SOURCES + _DIRECT_SOURCES),),
    "horovod/common/gloo/gloo_context.h": (
        ("struct GlooContext {\n", "class DirectExchange;\n\nstruct GlooContext {\n"),
        (_CONTEXTS, f"{_CONTEXTS}  std::shared_ptr<DirectExchange> direct_exchange = nullptr;\n"),
    ),
    "horovod/common/gloo/gloo_controller.cc": (
        (
            '#include "gloo_context.h"\n',
            '#include "direct_exchange.h"\n#include "gloo_context.h"\n',
        ),
        (_BITS.format("And"), _DIRECT_BITS.format("And")),
        (_BITS.format("Or"), _DIRECT_BITS.format("Or")),
        (_SPLITS, _SPLITS + _DIRECT_SPLITS),
    ),
    "horovod/common/ops/gloo_operations.cc": (
        (
            '#include "../common.h"\n',
            '#include "../common.h"\n#include "../gloo/direct_exchange.h"\n',
        ),
        (_ALLREDUCE, _DIRECT_ALLREDUCE),
        (_ALLGATHER, _ALLGATHER.replace("\n\n", f"\n{_DIRECT_ALLGATHER}")),
        (_ALLTOALL, _DIRECT_ALLTOALL + _ALLTOALL),
        (_PREPARE, _OFFER + _PREPARE),
    ),
    # gloo sends data only after the receiver has announced its buffer, on the same connection as
    # the data. If `send` is posted first, the announcement queues behind the rank's own data and
    # the peer waits for it: unless messages are small, a link then carries data in one direction
    # at a time. gloo's all-reduce posts `recv` first. A rank copies its own chunk meanwhile.
    "third_party/gloo/gloo/alltoallv.cc": (
        (
            f"{_COPY}\n  // Remote copy.\n{_RANKS}{_SEND_TO}{_RECEIVE_FROM}  }}\n",
            f"{_RANKS}{_RECEIVE_FROM}  }}\n{_RANKS}{_SEND_TO}  }}\n{_COPY}",
        ),
    ),
    "third_party/gloo/gloo/allgatherv.cc": (
        (
            f"{_FIRST}  {_SEND}  {_RECEIVE}{_LATER}{_SEND}{_RECEIVE}",
            f"{_FIRST}  {_RECEIVE}  {_SEND}{_LATER}{_RECEIVE}{_SEND}",
        ),
    ),
    # While another thread sends, it holds the connection's lock, and the thread that waits for
    # events finds the same event again at once. Without this patch it spins, and on a busy
    # processor takes the time of the thread that it waits for.
    "third_party/gloo/gloo/transport/tcp/pair.cc": (
        ("#include <sstream>\n", "#include <sstream>\n#include <thread>\n"),
        (
            f"{_TRY_LOCK}    return;\n",
            f"{_TRY_LOCK}    std::this_thread::yield();\n    return;\n",
        ),
    ),
    # Ranks negotiate a thousand times a second which tensors are ready, even when none is. With
    # this patch an idle rank waits until it has a tensor, 100 ms at most: no exchange can begin
    # before that, and other ranks in a negotiation wait for this rank anyway. Not with process
    # sets, which negotiate one after the other.
    #
    # Horovod also begins no negotiation within a millisecond of the one before. With this patch
    # only after one that found nothing to exchange, so that an exchange that follows another, as
    # buckets and phases do, does not wait.
    "horovod/common/operations.cc": (
        (
            _PAUSE,
            "  static bool exchanged = false;\n"
            "  const bool pauses = !exchanged || state.process_set_table.Ids().size() != 1;\n"
            "  exchanged = false;\n"
            f"{_PAUSE.replace('if (', 'if (pauses && ')}",
        ),
        (
            _RESPONSES,
            _RESPONSES.replace(
                "\n\n", "\n    exchanged = exchanged || !response_list.responses().empty();\n\n"
            ),
        ),
        (
            _CYCLE,
            "  if (state.process_set_table.Ids().size() == 1) {\n"
            "    state.process_set_table.Get(0).tensor_queue.WaitForTensors(\n"
            f"        std::chrono::milliseconds(100));\n  }}\n{_CYCLE}",
        ),
    ),
    "horovod/common/tensor_queue.h": (
        (
            "#include <mutex>\n",
            "#include <chrono>\n#include <condition_variable>\n#include <mutex>\n",
        ),
        (
            _LAST_METHOD,
            f"{_LAST_METHOD}\n"
            "  // Returns when there are tensors, or after that time.\n"
            "  void WaitForTensors(std::chrono::milliseconds longest) {\n"
            "    std::unique_lock<std::mutex> lock(mutex_);\n"
            "    arrived_.wait_for(lock, longest, [this] { return !tensor_table_.empty(); });\n"
            "  }\n",
        ),
        (
            "  mutable std::mutex mutex_;\n",
            "  mutable std::mutex mutex_;\n\n  std::condition_variable arrived_;\n",
        ),
    ),
    "horovod/common/tensor_queue.cc": (
        (f"{_QUEUED}  return", f"{_QUEUED}{_ANNOUNCE}  return"),
        (_ALL_QUEUED, _ALL_QUEUED + _ANNOUNCE),
    ),
}


def added_file(name: str) -> Path:
    """Returns the path of one of the `ADDED` files."""
    return Path(__file__).with_name(name)


def fingerprint() -> str:
    """Returns a digest of all changes: others make another Horovod."""
    added = [added_file(name).read_text(encoding="utf-8") for name in ADDED.values()]
    return hashlib.sha256(json.dumps([CHANGES, ADDED, added]).encode()).hexdigest()[:12]
