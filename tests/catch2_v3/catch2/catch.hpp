// Catch2 3 under the names of Catch2 2, in which the tests are written: CMake adds this folder where Catch2 is 3 or newer.
// It is this way round because the tests use few names. For the other way every test would change, and version 2 would need
// a header here for each of those that version 3 has. What both versions call the same needs no line.
#pragma once

#include <catch2/catch_approx.hpp>
#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators_all.hpp>
#include <catch2/matchers/catch_matchers_floating_point.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#ifdef CATCH_CONFIG_RUNNER  // main.cpp says so, for version 2
#include <catch2/catch_session.hpp>
#include <catch2/catch_test_case_info.hpp>
#include <catch2/internal/catch_test_case_registry_impl.hpp>
#endif

// Headers of the standard library that come with version 2's header: a test that forgets one must not fail here only.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

using Catch::Approx;

namespace Catch {
namespace Matchers {

inline auto Contains(const std::string& part) { return ContainsSubstring(part); }

}  // namespace Matchers

using namespace Matchers;

}  // namespace Catch
