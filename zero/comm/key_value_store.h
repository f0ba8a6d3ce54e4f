// Where processes that do not know each other yet leave word. The hub of a job has one; a caller may bring its own, such
// as a torch.distributed store.
#pragma once

#include <string>

namespace ballast {

class KeyValueStore {
 public:
  virtual ~KeyValueStore() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  virtual std::string get(const std::string& key) = 0;  // waits until it is set
};

}  // namespace ballast
