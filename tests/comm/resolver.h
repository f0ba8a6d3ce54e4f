// Host names that a test makes up. In programs with resolver.cpp, getaddrinfo() finds them.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

namespace ballast::testing {

struct HostName {
  std::vector<std::string> addresses{};
  std::size_t failures = 0;  // look-ups that fail before one succeeds
};

std::map<std::string, HostName>&
host_names();  // the names of this process; no other thread may look up while a test changes them

}  // namespace ballast::testing
