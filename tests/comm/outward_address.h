// An address of this machine that is not loopback.
#pragma once

#include <ifaddrs.h>
#include <netdb.h>

#include <array>
#include <memory>
#include <string>

#include "zero/comm/socket.h"

namespace ballast::testing {

// Empty if there is none.
inline std::string outward_address() {
  ifaddrs* found = nullptr;
  if (::getifaddrs(&found) != 0) return {};
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> all(found, ::freeifaddrs);
  for (const ifaddrs* each = all.get(); each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr || each->ifa_addr->sa_family != AF_INET) continue;
    std::array<char, NI_MAXHOST> host{};
    ::getnameinfo(each->ifa_addr, sizeof(sockaddr_in), host.data(), host.size(), nullptr, 0, NI_NUMERICHOST);
    if (!is_loopback(host.data())) return host.data();
  }
  return {};
}

}  // namespace ballast::testing
