// The user of the process at the other end of a connection within this machine, as the kernel knows it.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string_view>

#include "kernels/runtime/descriptor.h"

namespace ballast {

enum class OtherEnd {
  accepted,  // it is of this process's user, or on another machine, or this machine has no table of its sockets
  foreign,   // it is of another user of this machine
  gone,      // its process has closed it
};

OtherEnd other_end_of(const Descriptor& socket);

// The user of the socket `local` that is connected with `remote`. The table is the text of /proc/net/tcp, and the addresses have
// its form. None for a socket that its process has closed, whose user the kernel has forgotten.
std::optional<uid_t> owner_in(std::string_view table, std::string_view local, std::string_view remote);

}  // namespace ballast
