#include <ballast/log.h>

#include <fmt/format.h>

#include <array>
#include <cstdio>
#include <utility>

namespace ballast {

std::string_view name(Level level) {
  constexpr std::array<std::string_view, 4> names{"debug", "info", "warning", "error"};
  return names[static_cast<std::size_t>(level)];
}

void Log::to_stderr(Level level, std::string_view line) {
  const std::string text =
      level == Level::info ? fmt::format("ballast: {}\n", line) : fmt::format("ballast: {}: {}\n", name(level), line);
  std::fwrite(text.data(), 1, text.size(), stderr);  // one call, so that the lines of several processes stay whole
}

Log::Log(Sink sink, Level least) : sink_(std::move(sink)), least_(least) {}

void Log::write(Level level, std::string_view line) {
  const std::lock_guard lock(mutex_);
  if (level >= least_) {
    sink_(level, line);
  }
}

void Log::write_once(Level level, std::string_view subject, std::string_view line) {
  const std::lock_guard lock(mutex_);
  if (level >= least_ && said_.emplace(subject).second) {
    sink_(level, line);
  }
}

}  // namespace ballast
