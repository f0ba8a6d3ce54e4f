#include "offload/watchdog.h"

#include <fmt/format.h>

namespace ballast::offload {

void wait_watched(const Completion& completion, Log* log, const std::function<std::string()>& what,
                  std::chrono::milliseconds interval) {
  if (log == nullptr) return completion.wait();
  for (auto waited = interval; !completion.wait_for(interval); waited += interval) {
    log->warning(fmt::format("{} has not ended for {:.3g} s: the drive or its file system hangs", what(),
                             static_cast<double>(waited.count()) / 1000));
  }
}

}  // namespace ballast::offload
