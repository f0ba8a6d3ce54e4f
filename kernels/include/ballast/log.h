// Messages for the user, one line each. Each object that writes gets a Log; there is no global one.
#pragma once

#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <string_view>

namespace ballast {

enum class Level { debug, info, warning, error };

std::string_view name(Level level);

// Any thread may write. One thread at a time calls the sink, which must not write to the same Log.
class Log {
 public:
  using Sink = std::function<void(Level level, std::string_view line)>;

  static void to_stderr(Level level, std::string_view line);  // "ballast: warning: ..."

  explicit Log(Sink sink = to_stderr, Level least = Level::info);

  void write(Level level, std::string_view line);
  void debug(std::string_view line) { write(Level::debug, line); }
  void info(std::string_view line) { write(Level::info, line); }
  void warning(std::string_view line) { write(Level::warning, line); }
  void error(std::string_view line) { write(Level::error, line); }

  // Writes the first line of a subject, and drops later ones: write_once(Level::warning, "io_uring", "...").
  void write_once(Level level, std::string_view subject, std::string_view line);

 private:
  std::mutex mutex_;
  Sink sink_;
  Level least_;
  std::set<std::string, std::less<>> said_;
};

}  // namespace ballast
