// Waiting for a drive. One that hangs gives no error, so whoever waits says from time to time for what, and since when.
#pragma once

#include <functional>
#include <string>

#include "kernels/runtime/log.h"
#include "offload/completion.h"

namespace ballast::offload {

// As completion.wait(). `what` is called only when there is something to say; no log, nothing is said.
void wait_watched(const Completion& completion, Log* log, const std::function<std::string()>& what,
                  std::chrono::milliseconds patience = std::chrono::seconds(30));

}  // namespace ballast::offload
