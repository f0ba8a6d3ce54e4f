#include "tests/comm/resolver.h"

#include <dlfcn.h>
#include <netdb.h>

using ballast::testing::host_names;
using ballast::testing::HostName;

namespace ballast::testing {

std::map<std::string, HostName>& host_names() {
  static std::map<std::string, HostName> names;
  return names;
}

}  // namespace ballast::testing

// Takes the place of the C library's function in this program.
extern "C" int getaddrinfo(const char* name, const char* service, const addrinfo* hints, addrinfo** found) {
  static auto* const real = reinterpret_cast<decltype(&::getaddrinfo)>(::dlsym(RTLD_NEXT, "getaddrinfo"));
  const auto known = name == nullptr ? host_names().end() : host_names().find(name);
  if (known == host_names().end()) return real(name, service, hints, found);
  HostName& host = known->second;
  if (host.failures > 0) {
    --host.failures;
    return EAI_NONAME;
  }
  addrinfo** next = found;
  for (const std::string& address : host.addresses) {
    if (const int error = real(address.c_str(), service, hints, next); error != 0) return error;
    next = &(*next)->ai_next;
  }
  return 0;
}
