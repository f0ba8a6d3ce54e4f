// Addresses and ports of this machine.
#pragma once

#include <ifaddrs.h>
#include <netdb.h>

#include <array>
#include <memory>
#include <string>

#include "zero/comm/socket.h"

namespace ballast::testing {

// An address that is not loopback; empty if there is none.
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

inline std::uint16_t unused_port() { return local_endpoint(listen_at({"127.0.0.1", 0})).port; }

}  // namespace ballast::testing
