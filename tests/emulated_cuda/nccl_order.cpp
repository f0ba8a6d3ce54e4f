#include "tests/emulated_cuda/nccl_order.h"

#include <fmt/format.h>

#include "tests/emulated_cuda/rules.h"

namespace emulated {

void order_on_gpu(const void* communicator, NcclOrder& order, const IssuedPtr& work) {
  const std::lock_guard lock(order.mutex);
  if (order.last != nullptr && order.last_communicator != communicator && !is_ordered(*order.last, *work)) {
    broken("the work of different communicators is ordered on the GPU",
           fmt::format(
               "work {} of stream {} does not follow work {} of stream {}, so kernels of two communicators may wait "
               "for each other on two ranks",
               work->number, work->stream, order.last->number, order.last->stream));
  }
  order.last = work;
  order.last_communicator = communicator;
}

}  // namespace emulated
