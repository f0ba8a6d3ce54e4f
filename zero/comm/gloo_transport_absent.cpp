#include "kernels/runtime/error.h"
#include "zero/comm/gloo_transport.h"

namespace ballast {

bool has_gloo() { return false; }

std::unique_ptr<Transport> gloo_transport(const ProcessGroup&, MemoryAccounts&, const MakeTransport&) {
  fail(Code::no_transport,
       {.what = "this build of Ballast has no Gloo", .available = "libgloo-dev was not there when it was built"});
}

}  // namespace ballast
