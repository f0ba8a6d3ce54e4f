#include "offload/watchdog.h"

#include <fmt/format.h>

namespace ballast::offload {

void wait_watched(const Completion& completion, Log* log, const std::function<std::string()>& what,
                  std::chrono::seconds patience) {
  if (log == nullptr) return completion.wait();
  for (auto waited = patience; !completion.wait_for(patience); waited += patience) {
    log->warning(fmt::format("{} has not ended for {} s: the drive or its file system hangs", what(), waited.count()));
  }
}

}  // namespace ballast::offload
