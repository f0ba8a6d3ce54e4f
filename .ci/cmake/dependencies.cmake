# ballast_require(NAME): find_package() of what the build needs. Where it is missing, the error says how to install it.
# ballast_find(NAME [REQUIRED] [QUIET]): find_package(), which the installed ballastConfig.cmake repeats.

# The Debian and Ubuntu package of each.
set(ballast_package_Catch2 catch2)
set(ballast_package_CLI11 libcli11-dev)
set(ballast_package_fmt libfmt-dev)
set(ballast_package_nlohmann_json nlohmann-json3-dev)
set(ballast_package_Sodium libsodium-dev)
set(ballast_package_TBB libtbb-dev)

macro(ballast_require name)
  find_package(${name} QUIET)
  if(NOT ${name}_FOUND)
    message(FATAL_ERROR "Ballast needs ${name}, which was not found.\n"
      "On Debian and Ubuntu, `apt-get install ${ballast_package_${name}}` installs it, and `.ci/bootstrap build` installs "
      "all that the build needs. If it is in a folder of its own, add that folder to CMAKE_PREFIX_PATH.")
  endif()
endmacro()

macro(ballast_find name)
  set(ballast_find_options ${ARGN})
  if(REQUIRED IN_LIST ballast_find_options AND DEFINED ballast_package_${name})
    ballast_require(${name})
  else()
    find_package(${name} ${ARGN})
  endif()
  if(${name}_FOUND)
    set_property(GLOBAL APPEND PROPERTY BALLAST_DEPENDENCIES ${name})
  endif()
endmacro()
