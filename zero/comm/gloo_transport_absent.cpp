#include <ballast/error.h>

#include "zero/comm/process_transport.h"

namespace ballast {

bool has_gloo() { return false; }

std::unique_ptr<Transport> gloo_transport(const ProcessGroup&, const TransportSetup&) {
  fail(Code::no_transport, {.what = "cannot use Gloo: this build of Ballast has none",
                            .available = "libgloo-dev was missing when it was built"});
}

}  // namespace ballast
