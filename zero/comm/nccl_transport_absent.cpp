#include <ballast/error.h>

#include "zero/comm/process_transport.h"

namespace ballast {

std::string no_nccl_because() { return "CUDA or NCCL was missing when it was built"; }

std::unique_ptr<Transport> nccl_transport(std::unique_ptr<Transport>, const ProcessGroup&, const TransportSetup&) {
  fail(Code::no_transport,
       {.what = "cannot exchange GPU memory between processes: this build of Ballast has no NCCL",
        .available = no_nccl_because(),
        .remedy = "Build it where both are (nvidia-nccl-cu13 of PyPI will do), or train on one GPU."});
}

}  // namespace ballast
