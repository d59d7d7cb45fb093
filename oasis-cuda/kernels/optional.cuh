// Whether a policy's struct has an optional function: a template that is true where a declaration is valid.
#pragma once

template <class> struct Exists {
    using type = void;
};
