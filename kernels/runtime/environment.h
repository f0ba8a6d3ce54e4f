// Environment variables, read with types. This is the only place that asks the process for them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>

namespace ballast {

// An empty variable counts as unset; one that cannot be read is an error that names it (B1006).
// Any thread may read, as long as nobody in the process calls setenv at the same time.
class Environment {
 public:
  using Lookup = std::function<std::optional<std::string>(const std::string& name)>;

  Environment();                                                       // of this process
  explicit Environment(Lookup lookup) : lookup_(std::move(lookup)) {}  // of a test, or of a launcher's own making

  std::optional<std::string> text(const std::string& name) const;
  std::optional<std::int64_t> integer(const std::string& name) const;
  std::optional<std::size_t> bytes(const std::string& name) const;  // "512MiB"

 private:
  Lookup lookup_;
};

}  // namespace ballast
