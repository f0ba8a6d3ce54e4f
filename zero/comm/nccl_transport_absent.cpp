#include "kernels/runtime/error.h"
#include "zero/comm/nccl_transport.h"

namespace ballast {

std::unique_ptr<Transport> nccl_transport(std::unique_ptr<Transport>, const ProcessGroup&, const GpuPlace&,
                                          MemoryAccounts&, const MakeTransport&) {
  fail(Code::no_transport, {.what = "this build of Ballast has no NCCL", .available = "CUDA or NCCL was not there"});
}

}  // namespace ballast
