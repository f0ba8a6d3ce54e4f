// What a record says about where and when it was measured.
#pragma once

#include <string>
#include <string_view>

namespace ballast::benchmarks {

// "AMD EPYC 9554, 2 cores": the processor's name in the text of /proc/cpuinfo, with the cores this process may use.
std::string machine_name(std::string_view cpuinfo, std::size_t cores);
std::string this_machine();

std::string today();  // 2030-01-31, UTC

}  // namespace ballast::benchmarks
