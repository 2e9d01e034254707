// Elements of a row as floats, whatever they are kept in.
{% if dtype == "f32" %}
__device__ __forceinline__ float element(const float* row, int i) { return row[i]; }
__device__ __forceinline__ void put(float* row, int i, float x) { row[i] = x; }
{% else %}
__device__ __forceinline__ float element(const unsigned short* row, int i) { return {{ dtype }}_to_f32(row[i]); }
__device__ __forceinline__ void put(unsigned short* row, int i, float x) { row[i] = f32_to_{{ dtype }}(x); }
{% endif %}
