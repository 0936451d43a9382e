"""Pipeline steps, one leg each: build the body, make the call, keep the result on the context."""
