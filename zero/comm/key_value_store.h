// A key-value store, by which processes exchange addresses before they are connected. The hub of a job has one; a
// caller may pass its own, such as a torch.distributed store, which only connect() uses.
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
