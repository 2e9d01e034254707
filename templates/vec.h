// COUNT elements of 2, 4, 8 or 16 bytes together, which load_vec and store_vec move at once. They stay in registers
// where every index is known at compile time.
{% set member = "__forceinline__" if dialect == "host" else "__device__ __forceinline__" %}
template <class T, int COUNT>
struct alignas(sizeof(T) * COUNT) Vec {
    T element[COUNT];
    {{ member }} T& operator[](int i) { return element[i]; }
    {{ member }} const T& operator[](int i) const { return element[i]; }
};

// What the address of a Vec must be a multiple of: its bytes, or the ALIGN that a template names.
template <class T, int COUNT, int ALIGN>
struct VecAlign {
    static constexpr int BYTES = (int)sizeof(T) * COUNT, VALUE = ALIGN ? ALIGN : BYTES;
    static_assert(BYTES == 2 || BYTES == 4 || BYTES == 8 || BYTES == 16, "a Vec has 2, 4, 8 or 16 bytes");
    static_assert((VALUE & (VALUE - 1)) == 0 && VALUE >= (int)sizeof(T) && VALUE <= BYTES,
                  "the alignment of a Vec is a power of two, from its element's to its own bytes; left out, these");
};
