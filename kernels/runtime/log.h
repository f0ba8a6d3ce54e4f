// Messages for people, one line each. A Log is passed to whoever has something to say; there is no global one.
#pragma once

#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <string_view>

namespace ballast {

enum class Level { debug, info, warning, error };

std::string_view name(Level level);

// Any thread may write; the sink is called by one at a time, and must not write to the same Log.
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

  // The first line given for a subject is written, later ones are dropped: write_once(Level::warning, "io_uring", "...").
  void write_once(Level level, std::string_view subject, std::string_view line);

 private:
  std::mutex mutex_;
  Sink sink_;
  Level least_;
  std::set<std::string, std::less<>> said_;
};

}  // namespace ballast
