#include "tests/emulated_cuda/nccl_order.h"

#include <string>

#include "tests/emulated_cuda/rules.h"
#include "tests/emulated_cuda/streams.h"

namespace emulated {

void order_on_gpu(const void* communicator, NcclOrder& order, CUstream_st& stream) {
  NcclClock known = known_to_host();
  const std::lock_guard lock(stream.mutex);
  advance(known, stream.clock);
  const auto gpu = static_cast<std::size_t>(stream.gpu);
  if (known[gpu] < order.issued && order.last_communicator != communicator) {
    broken("the work of different communicators is ordered on the GPU",
           "work number " + std::to_string(order.issued + 1) + " of GPU " + std::to_string(gpu) +
               " follows only number " + std::to_string(known[gpu]) +
               ", so kernels of two communicators may wait for each other on two ranks");
  }
  stream.clock[gpu] = ++order.issued;
  order.last_communicator = communicator;
}

}  // namespace emulated
