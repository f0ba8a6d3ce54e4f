// Typed environment variables. No other code reads the process's environment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>

namespace ballast {

// An empty variable counts as unset. An invalid value throws B1006 with the variable's name.
// Any thread may read while no thread of the process calls setenv.
class Environment {
 public:
  using Lookup = std::function<std::optional<std::string>(const std::string& name)>;

  Environment();                                                       // the environment of this process
  explicit Environment(Lookup lookup) : lookup_(std::move(lookup)) {}  // the environment of a test or a launcher

  std::optional<std::string> text(const std::string& name) const;
  std::optional<std::int64_t> integer(const std::string& name) const;
  std::optional<std::size_t> bytes(const std::string& name) const;  // "120GiB", see parse_bytes()

 private:
  Lookup lookup_;
};

}  // namespace ballast
