# ballast_find(NAME [REQUIRED] [QUIET]): find_package(), which the installed ballastConfig.cmake repeats.

macro(ballast_find name)
  find_package(${name} ${ARGN})
  if(${name}_FOUND)
    set_property(GLOBAL APPEND PROPERTY BALLAST_DEPENDENCIES ${name})
  endif()
endmacro()
