// A wait that warns if a drive hangs. Such a drive gives no error, so the waiting thread logs from time to time what it
// waits for, and for how long.
#pragma once

#include <ballast/log.h>

#include <functional>
#include <string>

#include "offload/completion.h"

namespace ballast::offload {

// Waits as completion.wait() does. Calls `what` only for a warning, and never warns without a log.
void wait_watched(const Completion& completion, Log* log, const std::function<std::string()>& what,
                  std::chrono::milliseconds interval = std::chrono::seconds(30));

}  // namespace ballast::offload
