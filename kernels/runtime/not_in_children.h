// A connection, a lock or a ring ends when the last process that has it open does. A child of fork() has all that its parent
// has: it would keep others from noticing that the parent is gone.
#pragma once

namespace ballast {

// As long as it lives, a child gets nothing in place of the descriptor.
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
