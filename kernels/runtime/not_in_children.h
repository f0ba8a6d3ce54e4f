// Closes a descriptor in forked children. A connection, a lock or a ring ends with the last process that has it open,
// so a child that inherits it would hide the end of its parent.
#pragma once

namespace ballast {

// While the object lives, children of fork() get /dev/null instead of the descriptor. Any thread may make and destroy
// objects.
class NotInChildren {
 public:
  explicit NotInChildren(int descriptor);
  ~NotInChildren();
  NotInChildren(const NotInChildren&) = delete;
  NotInChildren& operator=(const NotInChildren&) = delete;

 private:
  int descriptor_;
};

}  // namespace ballast
