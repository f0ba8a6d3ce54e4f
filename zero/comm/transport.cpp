#include "zero/comm/transport.h"

#include <ballast/error.h>

namespace ballast {

void Transport::exchange_together(const SentChunk&, const ReceiveTogether&) {
  fail(Code::internal, {.what = "cannot deliver the bytes of all ranks together: the transport has no such exchange"});
}

}  // namespace ballast
