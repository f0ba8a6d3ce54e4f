#include "kernels/runtime/not_in_children.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <mutex>
#include <set>

namespace ballast {
namespace {

struct Kept {
  std::mutex mutex;
  std::set<int> descriptors;
};
Kept& kept();

// Runs in the child. It calls no function that needs a lock which another thread of the parent may have held. The
// numbers stay in use, because their owners in the child will close them.
void let_go() {
  const int nothing = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  for (const int descriptor : kept().descriptors) {
    ::dup3(nothing, descriptor, O_CLOEXEC);
  }
  ::close(nothing);
  kept().mutex.unlock();
}

// Never freed: a process may fork until it ends.
Kept& kept() {
  static auto* const all = [] {
    ::pthread_atfork([] { kept().mutex.lock(); }, [] { kept().mutex.unlock(); }, let_go);
    return new Kept;
  }();
  return *all;
}

}  // namespace

NotInChildren::NotInChildren(int descriptor) : descriptor_(descriptor) {
  const std::lock_guard lock(kept().mutex);
  kept().descriptors.insert(descriptor);
}

NotInChildren::~NotInChildren() {
  const std::lock_guard lock(kept().mutex);
  kept().descriptors.erase(descriptor_);
}

}  // namespace ballast
